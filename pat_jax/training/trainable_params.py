"""Splits a policy into trained and frozen parameters: either all of it is trained, or adapters.

Also sums gradients over FSDP groups, once for each optimizer step: a group adds up the gradients of
its own rows, so that nothing is sent between groups in a micro-batch. Knows shapes, shardings, and
how adapters and base combine. Does not know losses or optimizers.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pat_jax.common.owners import is_absent
from pat_jax.common.pytree import with_sharding, without_shards
from pat_jax.layout.fsdp_groups import FsdpGroups
from pat_jax.layout.layout import Layout
from pat_jax.models.lora import Lora
from pat_jax.models.policy import Params, Policy
from pat_jax.rl.algorithm.losses import Sums
from pat_jax.rl.algorithm.predict import Predictor
from pat_jax.rl.algorithm.update import TrainState, Update, zero_gradients
from pat_jax.rl.batches.train_batch import MicroBatch

# Float32 arrays in the parameters' shapes; with several FSDP groups, these are a new first axis.
Gradients = Any
Leaves = Any  # the tree of the policy's parameters, or that of its adapters


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


@dataclass
class TrainableParams:
    """Which parameters of a policy are trained and which frozen. Programs take both as inputs."""

    policy: Policy
    layout: Layout
    lora: Lora | None = None  # None: the whole policy is trained
    compute_dtype: jnp.dtype = jnp.float32
    """Dtype of matrix products, of the base under adapters, and of gradients that are sent."""
    weight_dtype: jnp.dtype = jnp.float32
    """Dtype of the trained parameters, except adapters, which are float32."""
    shares_base: bool = False
    """Whether the base under the adapters belongs to another role, and is in the memory anyway."""
    frozen: Leaves = field(default_factory=dict)
    """Parameters of the base, once they are there; empty if the whole policy is trained."""

    @cached_property
    def shardings(self) -> Leaves:
        return self.layout.param_shardings(self.lora or self.policy, role="train")

    @property
    def abstract(self) -> Leaves:
        """Shapes with shardings of the trained parameters."""
        if self.lora:
            return with_sharding(self.lora.abstract_params, self.shardings)
        return with_sharding(self.policy.abstract(self.weight_dtype), self.shardings)

    @cached_property
    def abstract_gradients(self) -> Leaves:
        """Shapes with shardings of the gradients that are summed over micro-batches."""
        return with_sharding(
            jax.eval_shape(self.gradients.zero_gradients, self.abstract), self.gradients.shardings
        )

    @cached_property
    def gradients(self) -> GroupGradients:
        """How gradients are summed."""
        layout = self.layout
        of_params = self.shardings
        # Experts may be divided over all groups. With TP inside `shard_map` over groups, XLA's
        # partitioner aborts.
        if not layout.group_axes or layout.tp_axes or self.policy.config.experts:
            return GroupGradients(of_params, of_params)
        of_groups = layout.param_shardings(self.lora or self.policy, "train", "group")
        dtype = jnp.float32 if self.lora else self.compute_dtype
        return GroupGradients(of_groups, of_params, FsdpGroups(layout), dtype)

    @cached_property
    def abstract_frozen(self) -> Leaves:
        """Shapes with shardings of the base; empty if the whole policy is trained."""
        if not self.lora:
            return {}
        return with_sharding(self.policy.abstract(self.compute_dtype), self.base_shardings)

    @property
    def base_shardings(self) -> Leaves:
        """Shardings of the policy's own parameters, trained or frozen."""
        return self.layout.param_shardings(self.policy, role="train")

    def init(self, seed: int) -> Leaves:
        """Returns initial trained parameters: those of a random policy, or new adapters. Adapters
        on a base with a scalar head include a copy of that head."""
        if is_absent(self.layout.devices):
            return without_shards(self.abstract)
        if self.lora:
            return self.lora.init(seed, self.shardings, self.frozen or None)
        return self.policy.init(seed, self.shardings, self.weight_dtype)

    def whole(self, frozen: Leaves, params: Leaves) -> Leaves:
        """Returns the policy's parameters; each adapted weight has its adapter (`Lora.attach`)."""
        return self.lora.attach(frozen, params) if self.lora else params

    def unscaled(self, frozen: Leaves, params: Leaves) -> Leaves:
        """Returns `whole` without the adapters' scale (see `factors`), also for trees of shapes."""
        return self.lora.beside_each(frozen, params) if self.lora else params

    @property
    def factors(self) -> list[float]:
        """The factors by which `whole` multiplies the arrays of `unscaled`."""
        if not self.lora:
            return [1.0] * len(jax.tree.leaves(self.abstract))
        return jax.tree.leaves(self.lora.factors)

    def over(self, frozen: Leaves, predictor: Predictor) -> Predictor:
        """Returns a predictor that takes only the trained parameters; `frozen` is filled in."""
        if not self.lora:
            return predictor
        model = predictor.model

        def forward(
            params: Leaves, tokens: Array, positions: Array, routes: Array | None
        ) -> tuple[Array, dict[str, Array]]:
            return model.forward(self.whole(frozen, params), tokens, positions, routes)

        def head(params: Leaves) -> Any:
            return model.head(self.whole(frozen, params))

        return replace(predictor, model=replace(model, forward=forward, head=head))
