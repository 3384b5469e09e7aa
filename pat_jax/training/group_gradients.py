"""The gradients of an update, summed over FSDP groups once for each optimizer step.

A group adds up the gradients of its own rows, so that nothing is sent between groups in a
micro-batch. With one group, this does the same as `rl/algorithm/update.py`.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pat_jax.layout.fsdp_groups import FsdpGroups
from pat_jax.models.policy import Params
from pat_jax.rl.algorithm.losses import Sums
from pat_jax.rl.algorithm.update import TrainState, Update, zero_gradients
from pat_jax.rl.batches.train_batch import MicroBatch

# Float32 arrays in the parameters' shapes; with several FSDP groups, these are a new first axis.
Gradients = Any


@dataclass(frozen=True)
class GroupGradients:
    """How gradients are summed over micro-batches and FSDP groups."""

    shardings: Any  # shardings of the gradients
    of_params: Any  # shardings of the trained parameters
    groups: FsdpGroups | None = None  # None: gradients are complete after each micro-batch
    dtype: jnp.dtype = jnp.float32  # of the gradients that groups send to each other

    def zero_gradients(self, params: Params) -> Gradients:
        zeros = zero_gradients(params)
        if self.groups is None:
            return zeros
        count = self.groups.count
        return jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), zeros)

    def grad_step(
        self, update: Update, params: Params, micro: MicroBatch, grads: Gradients, sums: Sums
    ) -> tuple[Gradients, Sums]:
        """Returns the result of `Update.grad_step`, with separate gradients for each group's rows.

        Args:
          update: the update; its model's functions are those for the layout of one group.
        """
        if self.groups is None:
            return update.grad_step(params, micro, grads, sums)

        def of_one(params: Params, micro: MicroBatch, grads: Params) -> tuple[Params, Sums]:
            return update.grad_step(params, micro, grads, update.zero_sums())

        rows = self.groups.split_rows(micro)
        grads, of_groups = self.groups.each(of_one, params, rows, grads)
        # Gathered before the loop, not in each of its rounds.
        of_groups = jax.lax.with_sharding_constraint(of_groups, self.groups.layout.sharding())
        sums, _ = jax.lax.scan(lambda a, b: (update.add_sums(a, b), None), sums, of_groups)
        return grads, sums

    def apply_step(
        self, update: Update, state: TrainState, grads: Gradients
    ) -> tuple[TrainState, Array, Array]:
        """Returns the result of `Update.apply_step` with the gradients summed over groups."""
        if self.groups is not None:
            grads = self.groups.total(grads, (self.shardings, self.of_params), self.dtype)
        return update.apply_step(state, grads)
