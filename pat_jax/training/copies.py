"""Sums gradients where groups of devices have copies of the parameters (HSDP, `--fsdp_size`).

The devices of a copy add up the gradients of their own rows. Copies are summed once for each
optimizer step, not for each micro-batch, so that less is sent between hosts.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from pat_jax.layout.layout import Layout
from pat_jax.rl.algorithm.losses import Sums
from pat_jax.rl.algorithm.update import TrainState, Update
from pat_jax.rl.batches.batches import MicroBatch

Gradients = Any  # arrays like the parameters; with several copies, each has a leading axis of copies


@dataclass(frozen=True)
class Copies:
    """The copies of a layout's trained parameters; without `axes` there is one."""

    layout: Layout
    axes: tuple[str, ...]  # of the mesh, along which devices have the same part of the parameters
    dtype: jnp.dtype  # in which copies send each other their gradients

    @property
    def count(self) -> int:
        return self.layout.size(self.axes)

    def sharding(self, of_params: NamedSharding) -> NamedSharding:
        """Returns the sharding of a parameter's gradients."""
        if not self.axes:
            return of_params
        return NamedSharding(of_params.mesh, PartitionSpec(self.axes, *of_params.spec))

    def apart(self, zeros: Gradients) -> Gradients:
        """Returns zeros for each copy."""
        if not self.axes:
            return zeros
        return jax.tree.map(lambda x: jnp.zeros((self.count, *x.shape), x.dtype), zeros)

    def split(self, micro: MicroBatch) -> MicroBatch:
        """Returns the rows of each copy: arrays[copies, rows / copies, …], without moving any."""
        inside, count = self.layout.size(self.layout.fsdp_axes), self.count
        sharding = NamedSharding(self.layout.mesh, PartitionSpec(self.axes, self.layout.fsdp_axes))

        def of_copies(x: Array) -> Array:
            # `batch` is split over `fsdp_axes` first, then over `copy_axes`.
            shards = x.reshape(inside, count, -1, *x.shape[1:])
            rows = shards.swapaxes(0, 1).reshape(count, -1, *x.shape[1:])
            return jax.lax.with_sharding_constraint(rows, sharding)

        return jax.tree.map(of_copies, micro)

    def add(
        self, update: Update, params: Any, micro: MicroBatch, grads: Gradients, sums: Sums
    ) -> tuple[Gradients, Sums]:
        """Does `Update.grad_step` for the rows of each copy by itself.

        Args:
          update: of the model in the layout of one copy.
        """
        if not self.axes:
            return update.grad_step(params, micro, grads, sums)

        def of_one(params: Any, micro: MicroBatch, grads: Gradients) -> tuple[Gradients, Sums]:
            own = [jax.tree.map(lambda x: x[0], tree) for tree in (micro, grads)]
            found = update.grad_step(params, *own, update.zero_sums())
            return jax.tree.map(lambda x: x[None], found)

        each = PartitionSpec(self.axes)
        grads, of_copies = jax.shard_map(
            of_one,
            mesh=self.layout.mesh,
            in_specs=(PartitionSpec(), each, each),
            out_specs=each,
            axis_names=set(self.axes),
            check_vma=False,
        )(params, self.split(micro), grads)
        sums, _ = jax.lax.scan(lambda a, b: (update.add_sums(a, b), None), sums, of_copies)
        return grads, sums

    def apply(
        self, update: Update, state: TrainState, grads: Gradients
    ) -> tuple[TrainState, Array, Array]:
        """Does `Update.apply_step` with the sum of all copies' gradients."""
        return update.apply_step(state, self.joined(grads))

    def joined(self, grads: Gradients) -> Gradients:
        """Returns the sum over copies."""
        if not self.axes:
            return grads

        def summed(x: Array) -> Array:
            return jax.lax.psum(x[0].astype(self.dtype), self.axes).astype(x.dtype)

        return jax.shard_map(
            lambda tree: jax.tree.map(summed, tree),
            mesh=self.layout.mesh,
            in_specs=PartitionSpec(self.axes),
            out_specs=PartitionSpec(),
            axis_names=set(self.axes),
        )(grads)
