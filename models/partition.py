"""The interface through which a model's arrays are split over devices, by axis names alone.

The same model code runs in two ways. Under automatic sharding every array is whole, and the
compiler inserts the communication (`Partition` or a subclass that adds constraints). Inside
`shard_map` every array is this device's shard. The model then reads sizes from its arrays, and
calls `sum` after a contraction over a split axis. `Layout` maps axis names to mesh axes, which the
model does not know.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from pat_jax.models.kernels.kernel_choice import ANYWHERE, Kernels

Names = tuple[str | None, ...]  # axis names of an array's dimensions


class Rows(NamedTuple):
    """Tokens to be computed by experts. Layouts split the first dimension as the axis `batch`."""

    x: Any  # the experts' inputs, [rows, length, embed]
    chosen: Any  # numbers of each token's experts, int[rows, length, k]; below 0: no expert
    weights: Any  # weight of each chosen expert's output, [rows, length, k]


# (rows, some experts' weights, number of the first of these experts) -> their weighted outputs
ByExpert = Callable[[Rows, Any, Array | int], Array]


@dataclass(frozen=True)
class Partition:
    """How a model's arrays are split. Equal partitions split alike and share traced programs.

    With this base class the model sees every array whole, on devices of any kind."""

    @property
    def kernels(self) -> Kernels:
        """The kernels that compute attention and experts on the devices."""
        return ANYWHERE

    def sum(self, x: Array, *axes: str) -> Array:
        """Returns the total of partial sums that a contraction over the named axes has left."""
        del axes
        return x

    def gather(self, x: Array, axis: str) -> Array:
        """Returns x whole along its last dimension, whose axis name is `axis` (all-gather)."""
        del axis
        return x

    def shard_index(self, axis: str) -> Int[Array, ""] | int:
        """Index of the shard of `axis` that this device holds."""
        del axis
        return 0

    def num_shards(self, axis: str) -> int:
        """Number of shards of `axis`."""
        del axis
        return 1

    def constrain(self, x: Array, *axes: str | None) -> Array:
        """Returns an activation split as given: one axis name, or None, for each dimension."""
        del axes
        return x

    def look_up(self, table: Array, ids: Array) -> Array:
        """Returns the rows of a table [vocab, embed] for token `ids`, as [rows, length, embed]."""
        return jnp.take(table, ids, axis=0)

    def on_shards(
        self,
        function: Callable[..., Array],
        inputs: Sequence[tuple[Array, Names]],
        output: Names,
    ) -> Array:
        """Returns the result of `function`, applied to each device's shards without communication.

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
          experts: the experts' weights; the first dimension has the axis name `expert`.
        """
        return compute(rows, experts, 0)
