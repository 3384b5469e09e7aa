"""A role's model in its layout, before its parameters are loaded.

Knows rows of the table of roles. Does not know files, nor which roles a run has.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax.numpy as jnp

from pat_jax.config.role_table import Role
from pat_jax.layout.layout import Layout, shard_bytes
from pat_jax.models.lora import Lora
from pat_jax.models.policy import Policy
from pat_jax.rl.algorithm.losses import Loss
from pat_jax.rl.algorithm.predict import Predictor
from pat_jax.rl.algorithm.update import Update
from pat_jax.rl.batches.packing import Shape
from pat_jax.training.build import DTYPES, build_lora, functions_of, logit_tokens, optimizer_of
from pat_jax.training.reader import Reader
from pat_jax.training.trainable_params import TrainableParams


@dataclass(frozen=True)
class RoleModel:
    role: Role
    policy: Policy
    layout: Layout
    free: float = 0.0  # bytes of a device that all models of an update leave free; 0 if unknown

    @property
    def dtype(self) -> jnp.dtype:
        return DTYPES[self.role.compute.dtype]

    @cached_property
    def lora(self) -> Lora | None:
        """The adapters that are trained, or None if the model is trained whole or frozen.

        Raises:
          UserError: the options ask for adapters that the model cannot have.
        """
        trained = self.role.trained
        return build_lora(trained.lora, self.policy) if trained else None

    @cached_property
    def predictor(self) -> Predictor:
        """The function that predicts values, for a scalar head, or else log-probabilities."""
        role = self.role
        model = self.policy.config
        replays = role.replays_routes  # routers of all other models choose their own experts
        functions = functions_of(role.compute, self.policy, self.layout, router_replay=replays)
        if model.head == "scalar":
            return Predictor(functions, model.vocab_size)
        tokens = logit_tokens(self.policy, self.layout, self.free)
        return Predictor(functions, model.vocab_size, role.temperature, tokens)

    def update(self, loss: Loss) -> Update:
        """Returns the functions of this trained role's update, with its optimizer and `loss`."""
        trained = self.role.trained
        assert trained, f"the {self.role.name} is frozen"
        optimizer = optimizer_of(trained.optimization)
        coef = trained.router_aux_loss_coef
        return Update(self.predictor, optimizer, loss, coef, is_mean=trained.is_mean)

    def held(self, *, shares_base: bool = False) -> TrainableParams:
        """Returns which parameters are trained and which are frozen.

        A frozen model is kept in the dtype to which its forward pass rounds anyway. No precision is
        lost, and bfloat16 takes half the memory. The same holds for the base under adapters.

        Args:
          shares_base: whether the base under the adapters belongs to another role.
        """
        trained = self.role.trained
        dtype = self.dtype
        weights = DTYPES[trained.optimization.optimizer.weight_dtype] if trained else dtype
        return TrainableParams(
            self.policy,
            self.layout,
            self.lora,
            compute_dtype=dtype,
            weight_dtype=weights,
            shares_base=shares_base,
        )

    @property
    def update_bytes(self) -> int:
        """Bytes of a device for the parameters. If they are trained, also for two moments, the sum
        of gradients and those of a micro-batch, all taken as float32."""
        held = self.held()
        gradients = shard_bytes(held.abstract_gradients) if self.role.trained else 0
        return shard_bytes((held.abstract, held.abstract_frozen)) + 4 * gradients

    def reader(
        self, shapes: Sequence[Shape], held: TrainableParams | None = None, *, rests: bool = False
    ) -> Reader:
        """Returns the frozen role's `Reader`, which has no parameters yet.

        Args:
          held: the role's parameters, if they are adapters on another role's base; else None.
          rests: whether the model waits in the host's memory while it reads nothing.
        """
        role = self.role
        return Reader(
            role.column,
            held or self.held(),
            self.predictor,
            shapes,
            rests=rests,
            top_k=role.top_k,
        )


def with_free_memory(models: Sequence[RoleModel], limit: float) -> list[RoleModel]:
    """Returns the models of an update with the memory that they leave free of a device, which has
    `limit` bytes, or infinitely many if that is unknown."""
    if math.isinf(limit):
        return list(models)
    sizes = [(model.layout.devices, model.update_bytes) for model in models]
    return [
        replace(
            model,
            free=limit - sum(size for devices, size in sizes if devices & model.layout.devices),
        )
        for model in models
    ]
