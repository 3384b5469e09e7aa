"""FSDP groups: devices that divide the trainer's parameters, while other groups have copies (HSDP).

Knows the mesh axes of a layout without TP. Does not know what groups compute
(`training/trainable_params.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pat_jax.layout.layout import Layout


@dataclass(frozen=True)
class FsdpGroups:
    """The FSDP groups of a layout. Where groups have parts of their own, an array's first dimension
    is the group."""

    layout: Layout

    @property
    def count(self) -> int:
        return self.layout.size(self.layout.group_axes)

    def split_rows(self, rows: Any) -> Any:
        """Returns arrays[rows, …] as arrays[groups, rows / groups, …]. No row leaves its device."""
        inside = self.layout.size(self.layout.fsdp_axes)
        sharding = self.layout.sharding("group", "row_of_group", role="train")

        def of_groups(x: Array) -> Array:
            # Rows are split over the devices of a group first, then over groups.
            shards = x.reshape(inside, self.count, -1, *x.shape[1:])
            split = shards.swapaxes(0, 1).reshape(self.count, -1, *x.shape[1:])
            return jax.lax.with_sharding_constraint(split, sharding)

        return jax.tree.map(of_groups, rows)

    def each(self, function: Callable[..., Any], whole: Any, *own: Any) -> Any:
        """Applies `function` to `whole`, which all groups have, and to each group's part of `own`.

        Args:
          own: arrays[groups, …], like the result.
        """

        def of_one(whole: Any, *own: Any) -> Any:
            found = function(whole, *jax.tree.map(lambda x: x[0], own))
            return jax.tree.map(lambda x: x[None], found)

        of_group = self.layout.spec("group", role="train")
        return jax.shard_map(
            of_one,
            mesh=self.layout.mesh,
            in_specs=(self.layout.spec(), *[of_group] * len(own)),
            out_specs=of_group,
            axis_names=set(self.layout.group_axes),
            check_vma=False,  # else gradients of `whole` were summed over groups here
        )(whole, *own)

    def total(self, arrays: Any, shardings: tuple[Any, Any], dtype: jnp.dtype) -> Any:
        """Returns the sum of arrays[groups, …] over groups, which send them in `dtype`.

        Args:
          shardings: those of the arrays, and those of their sums.
        """

        def summed(x: Array) -> Array:
            return jax.lax.psum(x[0].astype(dtype), self.layout.group_axes).astype(x.dtype)

        # Over all axes: XLA aborts on a CPU's bfloat16 sums over some of them.
        of_groups, of_sum = (jax.tree.map(lambda x: x.spec, tree) for tree in shardings)
        return jax.shard_map(
            lambda arrays: jax.tree.map(summed, arrays),
            mesh=self.layout.mesh,
            in_specs=(of_groups,),
            out_specs=of_sum,
        )(arrays)
