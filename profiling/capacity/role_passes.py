"""Predicts the seconds of one role's passes over an iteration's micro-batches, on a target.

Knows one model. Does not know what the passes are for.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp

from pat_jax.config.role_table import Role
from pat_jax.engine.sizing.memory import shard_bytes
from pat_jax.layout.exchange import most_exchanged
from pat_jax.models.config import ModelConfig
from pat_jax.profiling.capacity.update_batches import Packed
from pat_jax.profiling.cross_compile.target_build import TargetBuild
from pat_jax.profiling.predict.composer import Composer
from pat_jax.profiling.predict.kernel_model import ModelledKernels
from pat_jax.profiling.predict.update_times import Seconds, UpdateTimes
from pat_jax.profiling.predict.update_work import (
    FLOAT32,
    Collective,
    Rows,
    UpdateWork,
    Work,
    apply_work,
)
from pat_jax.rl.batches.packing import Shape
from pat_jax.training.build import logit_tokens
from pat_jax.training.trainable_params import TrainableParams
from pat_jax.training.trainer import Trainer
from pat_jax.training.update_memory import fetched_bytes


@dataclass(frozen=True)
class RolePasses:
    """Predicts the seconds of the passes of one role. `held` has the role's parameters."""

    built: TargetBuild
    role: Role
    held: TrainableParams

    @property
    def model(self) -> ModelConfig:
        """The whole model, as it is padded on the target."""
        return self.held.policy.config

    @property
    def shapes(self) -> Sequence[Shape]:
        return self.built.micro_shapes

    @property
    def itemsize(self) -> int:
        """Bytes of one number in the forward pass."""
        return jnp.dtype(self.held.compute_dtype).itemsize

    @cached_property
    def work(self) -> UpdateWork:
        layout = self.held.layout
        lora = self.held.lora
        platform = self.built.order.target.chip.platform
        experts = self.model.experts
        return UpdateWork(
            self.model,
            layout.split.dp,
            layout.size(layout.fsdp_axes),
            self.role.compute.remat,
            lora.num_weights if lora else None,
            self.itemsize,
            logit_tokens(self.held.policy, layout) if platform == "cuda" else 0,
            most_exchanged(self.role.compute.experts, experts, layout, platform),
            layout.size(layout.ep_dp_axes),
            self._hosts_of_groups,
        )

    @property
    def _hosts_of_groups(self) -> int:
        """Hosts over which the devices with the same part of the parameters are spread."""
        layout = self.held.layout
        target = self.built.order.target
        parts = layout.split.tp * layout.size(layout.fsdp_axes)
        of_a_host = max(1, target.devices_per_host // parts)
        return max(1, layout.mesh.size // parts // of_a_host)

    @cached_property
    def times(self) -> UpdateTimes:
        target = self.built.order.target
        return UpdateTimes(Composer(ModelledKernels(target, sums="nccl"), self.model), target)

    def predictions(self, packed: Packed) -> Seconds:
        """Returns the seconds of one forward pass over all micro-batches."""
        return self._pass(self.work.scores, packed)

    def gradients(self, packed: Packed) -> Seconds:
        """Returns the seconds of all forward and backward passes of an iteration."""
        trained = self.role.trained
        passes = trained.num_iterations if trained else 0
        return self._pass(self.work.gradients, packed).times(passes)

    def apply(self, trainer: Trainer) -> Seconds:
        """Returns the seconds of all optimizer steps of an iteration by this role's `trainer`."""
        steps = self.built.order.run.updates_per_step
        return self.times.seconds(self._apply(trainer)).times(steps)

    def rows(self, shape: Shape, pairs: float = 0.0) -> Rows:
        """Returns a device's tokens of a micro-batch; `pairs` counts pairs of query and key."""
        return Rows(shape[0] * shape[1] // self.work.dp, pairs)

    def _pass(self, work_of: Callable[[Rows], Work], packed: Packed) -> Seconds:
        spent = Seconds()
        for shape, pairs in zip(packed.shapes, packed.pairs, strict=True):
            rows = self.rows(shape, pairs)
            spent += self.times.seconds(work_of(rows), rows.tokens)
        return spent

    def _sums_of_groups(self, gradients: int) -> Iterator[Collective]:
        """Yields the sum of gradients over FSDP groups, once for each optimizer step. `gradients`
        are the bytes of one device in float32."""
        summed = self.held.gradients
        if summed.groups:
            num_bytes = gradients * jnp.dtype(summed.dtype).itemsize / FLOAT32
            count = summed.groups.count
            hosts = self._hosts_of_groups
            yield Collective("all-reduce", num_bytes, count, hosts=hosts)

    def _apply(self, trainer: Trainer) -> Work:
        params = shard_bytes(trainer.abstract_params)
        optimizer = shard_bytes(trainer.state_in_a_step) - params
        gradients = shard_bytes(trainer.trained.abstract_gradients)
        return apply_work(
            params,
            gradients,
            optimizer,
            offloaded=fetched_bytes(trainer),
            sent=tuple(self._sums_of_groups(gradients)),
        )
