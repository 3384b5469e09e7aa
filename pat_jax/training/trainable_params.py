"""What of a policy is trained, and what is frozen: all of it and nothing, or adapters and their
base.

Knows shapes, shardings and how the two together are a policy. Does not know losses or optimizers.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pat_jax.common.pytree import with_sharding
from pat_jax.layout.layout import Layout
from pat_jax.models.lora import Lora
from pat_jax.models.policy import Policy
from pat_jax.rl.algorithm.update import PolicyUpdate, zero_gradients

Leaves = Any  # the tree of the policy's parameters, or that of its adapters


@dataclass
class TrainableParams:
    """A trainer's parameters are what is trained; what is frozen goes to every program beside
    them."""

    policy: Policy
    layout: Layout
    lora: Lora | None = None  # None: all of the policy is trained
    base_dtype: jnp.dtype = jnp.float32
    """Of the policy under the adapters."""
    weight_dtype: jnp.dtype = jnp.float32
    """In which what is trained is kept; adapters always in float32."""
    frozen: Leaves = field(default_factory=dict)
    """The base, once there is one; nothing where all is trained."""

    @cached_property
    def shardings(self) -> Leaves:
        return self.layout.param_shardings(self.lora or self.policy, role="train")

    @property
    def abstract(self) -> Leaves:
        """Shapes with shardings of what is trained."""
        if self.lora:
            return with_sharding(self.lora.abstract_params, self.shardings)
        return with_sharding(self.policy.abstract(self.weight_dtype), self.shardings)

    @cached_property
    def abstract_gradients(self) -> Leaves:
        """The same of what is added up over micro-batches."""
        return with_sharding(jax.eval_shape(zero_gradients, self.abstract), self.shardings)

    @cached_property
    def abstract_frozen(self) -> Leaves:
        """Shapes of the base; empty where all is trained."""
        if not self.lora:
            return {}
        return with_sharding(self.policy.abstract(self.base_dtype), self.base_shardings)

    @property
    def base_shardings(self) -> Leaves:
        """Where a policy's own parameters go, trained or frozen."""
        return self.layout.param_shardings(self.policy, role="train")

    def init(self, seed: int) -> Leaves:
        """What is trained, before it has learned anything: random where it is all of the policy."""
        if self.lora:
            return self.lora.init(seed, self.shardings)
        return self.policy.init(seed, self.shardings, self.weight_dtype)

    def whole(self, frozen: Leaves, params: Leaves) -> Leaves:
        """The policy, with adapters beside the weights that have one."""
        return self.lora.attach(frozen, params) if self.lora else params

    def unscaled(self, frozen: Leaves, params: Leaves) -> Leaves:
        """The same of arrays or of shapes, without the scale of the adapters: see `factors`."""
        return self.lora.beside_each(frozen, params) if self.lora else params

    @property
    def factors(self) -> list[float]:
        """What each array of `unscaled` is multiplied by in `whole`."""
        if not self.lora:
            return [1.0] * len(jax.tree.leaves(self.abstract))
        return jax.tree.leaves(self.lora.factors)

    def over(self, frozen: Leaves, update: PolicyUpdate) -> PolicyUpdate:
        """An update of the whole policy as one of what is trained, what is frozen being given."""

        model = update.model

        def forward(
            params: Leaves, tokens: Array, positions: Array, routes: Array | None
        ) -> tuple[Array, dict[str, Array]]:
            return model.forward(self.whole(frozen, params), tokens, positions, routes)

        def head(params: Leaves) -> Array:
            return model.head(self.whole(frozen, params))

        if not self.lora:
            return update
        return replace(update, model=replace(model, forward=forward, head=head))
