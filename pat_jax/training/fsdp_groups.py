"""Sums gradients where several FSDP groups have copies of the parameters (HSDP, `--fsdp_size`).

A group adds up the gradients of its own rows. Groups sum them once for each optimizer step, not for
each micro-batch, so that less is sent between hosts. With one group, all of this is that of
`rl/algorithm/update.py`.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from pat_jax.layout.layout import Layout
from pat_jax.rl.algorithm.losses import Sums
from pat_jax.rl.algorithm.update import TrainState, Update, zero_gradients
from pat_jax.rl.batches.batches import MicroBatch

# Float32 arrays like the parameters. If there are several groups, the first axis is theirs.
Gradients = Any


@dataclass(frozen=True)
class FsdpGroups:
    """The FSDP groups of a layout, each of which sums its own gradients."""

    layout: Layout
    of_params: Any  # shardings of the trained parameters
    axes: tuple[str, ...]  # of the mesh, along which groups lie; empty: there is one
    dtype: jnp.dtype  # in which groups send gradients to each other

    @property
    def count(self) -> int:
        return self.layout.size(self.axes)

    @property
    def shardings(self) -> Any:
        """Shardings of gradients."""
        if not self.axes:
            return self.of_params
        return jax.tree.map(
            lambda one: NamedSharding(one.mesh, PartitionSpec(self.axes, *one.spec)), self.of_params
        )

    def zero_gradients(self, params: Any) -> Gradients:
        zeros = zero_gradients(params)
        if not self.axes:
            return zeros
        return jax.tree.map(lambda x: jnp.zeros((self.count, *x.shape), x.dtype), zeros)

    def grad_step(
        self, update: Update, params: Any, micro: MicroBatch, grads: Gradients, sums: Sums
    ) -> tuple[Gradients, Sums]:
        """Does `Update.grad_step` for each group's rows.

        Args:
          update: of the model in the layout of one group.
        """
        if not self.axes:
            return update.grad_step(params, micro, grads, sums)

        def of_one(params: Any, *own: Any) -> tuple[Gradients, Sums]:
            micro, grads = jax.tree.map(lambda x: x[0], own)
            found = update.grad_step(params, micro, grads, update.zero_sums())
            return jax.tree.map(lambda x: x[None], found)

        each = PartitionSpec(self.axes)
        grads, of_groups = jax.shard_map(
            of_one,
            mesh=self.layout.mesh,
            in_specs=(PartitionSpec(), each, each),
            out_specs=each,
            axis_names=set(self.axes),
            check_vma=False,  # the gradients of copied parameters would be summed here
        )(params, self._rows(micro), grads)
        # Gathered here, not in each round of the loop.
        of_groups = jax.lax.with_sharding_constraint(of_groups, self.layout.sharding())
        sums, _ = jax.lax.scan(lambda a, b: (update.add_sums(a, b), None), sums, of_groups)
        return grads, sums

    def _rows(self, micro: MicroBatch) -> MicroBatch:
        """Returns arrays[groups, rows / groups, …]. No row leaves its device."""
        inside, axes = self.layout.fsdp_axes, PartitionSpec(self.axes, self.layout.fsdp_axes)

        def of_groups(x: Array) -> Array:
            # Rows are split over the devices of a group first, then over groups.
            shards = x.reshape(self.layout.size(inside), self.count, -1, *x.shape[1:])
            rows = shards.swapaxes(0, 1).reshape(self.count, -1, *x.shape[1:])
            sharding = NamedSharding(self.layout.mesh, axes)
            return jax.lax.with_sharding_constraint(rows, sharding)

        return jax.tree.map(of_groups, micro)

    def apply_step(
        self, update: Update, state: TrainState, grads: Gradients
    ) -> tuple[TrainState, Array, Array]:
        """Does `Update.apply_step` with the sum of all groups' gradients."""
        if not self.axes:
            return update.apply_step(state, grads)

        def summed(x: Array) -> Array:
            return jax.lax.psum(x[0].astype(self.dtype), self.axes).astype(x.dtype)

        of_grads, of_params = (
            jax.tree.map(lambda x: x.spec, tree) for tree in (self.shardings, self.of_params)
        )
        # Over all axes: XLA aborts on a CPU's bfloat16 sums over some of them.
        total = jax.shard_map(
            lambda grads: jax.tree.map(summed, grads),
            mesh=self.layout.mesh,
            in_specs=(of_grads,),
            out_specs=of_params,
        )(grads)
        return update.apply_step(state, total)
