"""What a model may ask about how its arrays are split, by axis name alone.

The same model code runs in two ways. Under automatic sharding every array is whole and the
compiler inserts the communication: `Whole` or a subclass that adds constraints. Inside
`shard_map` every array is this device's shard: the model reads sizes off its arrays and calls
`sum` where a contraction over a split axis has left a partial sum. Which mesh axes a name stands
for is the business of the engine's `Layout`, not of the model.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtyping import Array, Int

from pat_jax.models.kernels.kernel_choice import ANYWHERE, Kernels

Names = tuple[str | None, ...]  # of an array's dimensions


class Rows(NamedTuple):
    """Tokens on their way to their experts; `batch` is the first dimension of each array."""

    x: Any  # [rows, length, embed]
    chosen: Any  # int[rows, length, k]: experts; below 0: none
    weights: Any  # [rows, length, k], of what each of them adds


# From rows, some experts' weights and the number of the first of them to what those add.
ByExpert = Callable[[Rows, Any, Array | int], Array]


class Partition(ABC):
    """Equal ones split alike: what was traced with one holds for the other."""

    @property
    @abstractmethod
    def kernels(self) -> Kernels:
        """By whom attention is computed on the devices."""

    @abstractmethod
    def sum(self, x: Array, *axes: str) -> Array:
        """Adds the partial sums left by a contraction over the named axes."""

    @abstractmethod
    def gather(self, x: Array, axis: str) -> Array:
        """Concatenates the shards of the last dimension, which carries `axis`."""

    @abstractmethod
    def shard_index(self, axis: str) -> Int[Array, ""] | int:
        """Which shard of `axis` this device holds."""

    @abstractmethod
    def constrain(self, x: Array, *axes: str | None) -> Array:
        """Pins how an activation is split, one name or None for each dimension."""

    def on_shards(
        self,
        function: Callable[..., Array],
        inputs: Sequence[tuple[Array, Names]],
        output: Names,
    ) -> Array:
        """What `function`, which needs no communication, makes of each device's shards.

        For kernels, which compilers cannot split.

        Args:
          inputs: arrays, and the names of their dimensions.
          output: the names of the result's.
        """
        del output  # arrays are shards already, or nothing is split
        return function(*(x for x, _ in inputs))

    @abstractmethod
    def by_expert(self, compute: ByExpert, rows: Rows, experts: Any) -> Array:
        """The sum of what all experts add to the rows, of which `batch` is the first dimension.

        Args:
          experts: arrays whose first dimension is `expert`.
        """


@dataclass(frozen=True)
class Whole(Partition):
    """Nothing is split, as far as the model can see."""

    @property
    def kernels(self) -> Kernels:
        return ANYWHERE

    def sum(self, x: Array, *axes: str) -> Array:
        del axes
        return x

    def gather(self, x: Array, axis: str) -> Array:
        del axis
        return x

    def shard_index(self, axis: str) -> int:
        del axis
        return 0

    def constrain(self, x: Array, *axes: str | None) -> Array:
        del axes
        return x

    def by_expert(self, compute: ByExpert, rows: Rows, experts: Any) -> Array:
        return compute(rows, experts, 0)
