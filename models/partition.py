"""The interface by which a model handles how its arrays are split, by axis name alone.

The same model code runs in two ways. Under automatic sharding every array is whole and the
compiler inserts the communication (`Partition` or a subclass that adds constraints). Inside
`shard_map` every array is this device's shard: the model reads sizes from its arrays, and calls
`sum` where a contraction over a split axis has left a partial sum. `Layout` maps axis names to mesh
axes; the model does not know them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from pat_jax.models.kernels.kernel_choice import ANYWHERE, Kernels

Names = tuple[str | None, ...]  # axis names of an array's dimensions


class Rows(NamedTuple):
    """Tokens on their way to their experts. Layouts split the first dimension, as `batch`."""

    x: Any  # [rows, length, embed]
    chosen: Any  # int[rows, length, k]: experts; below 0: none
    weights: Any  # [rows, length, k], weight of each expert's output


# (rows, some experts' weights, number of the first of these experts) -> their weighted outputs
ByExpert = Callable[[Rows, Any, Array | int], Array]


@dataclass(frozen=True)
class Partition:
    """How a model's arrays are split. Equal partitions split alike and share traced programs.

    With this base class the model sees every array whole, on devices of any kind."""

    @property
    def kernels(self) -> Kernels:
        """Which kernels compute attention and experts on the devices."""
        return ANYWHERE

    def sum(self, x: Array, *axes: str) -> Array:
        """Adds the partial sums left by a contraction over the named axes."""
        del axes
        return x

    def gather(self, x: Array, axis: str) -> Array:
        """Concatenates the shards of the last dimension, which carries `axis`."""
        del axis
        return x

    def shard_index(self, axis: str) -> Int[Array, ""] | int:
        """Index of the shard of `axis` that this device holds."""
        del axis
        return 0

    def constrain(self, x: Array, *axes: str | None) -> Array:
        """Fixes how an activation is split: by one axis name, or None, for each dimension."""
        del axes
        return x

    def look_up(self, table: Array, ids: Array) -> Array:
        """Returns the rows [rows, length, embed] of a table [vocab, embed]."""
        return jnp.take(table, ids, axis=0)

    def on_shards(
        self,
        function: Callable[..., Array],
        inputs: Sequence[tuple[Array, Names]],
        output: Names,
    ) -> Array:
        """Applies `function`, which needs no communication, to each device's shards.

        This is for kernels, which compilers cannot split.

        Args:
          inputs: arrays with the axis names of their dimensions.
          output: the axis names of the result's dimensions.
        """
        del output  # arrays are shards already, or nothing is split
        return function(*(x for x, _ in inputs))

    def by_expert(self, compute: ByExpert, rows: Rows, experts: Any) -> Array:
        """Returns the sum of all experts' weighted outputs for each token.

        Args:
          compute: computes the outputs of the experts that a device holds.
          experts: arrays whose first dimension is `expert`.
        """
        return compute(rows, experts, 0)
