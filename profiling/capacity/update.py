"""Predicts the update of an iteration on a target: its seconds, its memory, its utilisation.

The trainer's own code packs the batches from the replayed lengths. The work of a program is
computed by arithmetic. Its memory is what the compiler reports, if it was compiled.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

import numpy as np

from pat_jax.common.text_table import percent
from pat_jax.config.compute import MemoryOptions
from pat_jax.config.programs import ProgramChoice
from pat_jax.config.role_table import POLICY, REFERENCE
from pat_jax.layout.exchange import buffer_rows, form_of_update
from pat_jax.layout.layout import shard_bytes
from pat_jax.models.kernels.row_attention import knows_branches
from pat_jax.planning.types import Split
from pat_jax.profiling.capacity.report import Batches, Update, UpdateMemory
from pat_jax.profiling.capacity.role_passes import Packed, RolePasses, other_stages
from pat_jax.profiling.cross_compile.compiled import CompiledProgram
from pat_jax.profiling.cross_compile.target_build import TargetBuild
from pat_jax.profiling.predict.kernel_model import BYTES
from pat_jax.profiling.predict.model_sizes import expert_weights
from pat_jax.profiling.predict.update_times import ATTENTION, Seconds
from pat_jax.profiling.predict.update_work import UpdateWork, checksum_work, transfer_work
from pat_jax.profiling.simulate.machine import Workload
from pat_jax.programs.programs import Key
from pat_jax.rl.batches.packing import Shape
from pat_jax.training.model_flops import training_flops
from pat_jax.training.remat_choice import kept_bytes
from pat_jax.training.role_model import RoleModel
from pat_jax.training.trainer import CRITIC, Trainer
from pat_jax.training.update_memory import (
    STEP,
    fetched_bytes,
    largest,
    resident_bytes,
    resting_bytes,
    shortage,
    stages_of,
    tightness,
)


@dataclass(frozen=True)
class PlannedUpdate:
    """Predicts the update of one run on one target."""

    built: TargetBuild
    programs: Sequence[CompiledProgram]  # empty: nothing was compiled
    options: MemoryOptions  # to suggest if memory is short

    def of(self, workloads: Sequence[Workload], target: Split) -> Update:
        """Returns the update for rollouts that begin in the layout `target`."""
        size = self.run.algorithm.mini_batch_size * self.run.rollout.num_generations
        is_shared = knows_branches(self.trainer.layout.platform)
        packed = [
            Packed.of(each, size, self.shapes, self.work.dp, shares_prompts=is_shared)
            for each in workloads
        ]
        lengths = [each.prompts + each.responses for each in workloads]
        count = len(packed)
        once = sum((self.passes.predictions(each) for each in packed), Seconds())
        scoring = once.times(len(self._predicting) / count)
        gradients = sum((self.passes.gradients(each) for each in packed), Seconds())
        gradients = gradients.times(1 / count)
        apply = self.passes.apply(self.trainer)
        others = other_stages(self.built, packed)
        update_s = sum(x.total for x in (scoring, gradients, apply, *others.values()))
        flops = fmean(map(self._flops, lengths, (np.array(each.shared) for each in packed)))
        peak = self.built.order.target.num_devices * self.built.order.target.chip.flops_s
        return Update(
            self.trainer.layout.split,
            self.work.fsdp,
            self._predicting,
            self._batches(lengths, packed),
            scoring,
            gradients,
            apply,
            self.transfer(target),
            target,
            flops,
            flops / update_s / peak,
            self._most_needed(target),
            tuple(others.items()),
        )

    @property
    def _predicting(self) -> tuple[str, ...]:
        """The policies whose log-probabilities are computed before the first optimizer step."""
        own = ("the policy before its first step",) * self.trainer.predicts
        others = self.built.order.others
        return (*own, *(f"the {name}" for name in self.built.whole.readers if name not in others))

    def _batches(self, lengths: Sequence[np.ndarray], packed: Sequence[Packed]) -> Batches:
        tokens = [sum(each) - sum(x.shared) for each, x in zip(lengths, packed, strict=True)]
        return Batches(
            fmean(tokens),
            fmean(each.slots for each in packed),
            fmean(len(each.shapes) for each in packed),
            self.shapes[-1],
            self.run.updates_per_step,
        )

    @property
    def notes(self) -> Iterator[str]:
        """The assumptions of the prediction, a sentence each."""
        yield (
            "Gradients multiply as fast as the forward pass, and attention in training reaches "
            f"{percent(ATTENTION[self.built.order.target.chip.name])} of the peak (assumed)."
        )
        role = self.passes.role
        if self.options.compute.remat == "auto":
            yield f"The layers' values are recomputed as with --remat {role.compute.remat}, which fits into memory."
        trained = role.trained
        if trained and trained.optimization.optimizer.offload:
            yield "Moments travel at the published rate of the bus to the host, nothing else at the time (assumed)."
        elif self.run.rest == "host":
            yield "Models travel at the published rate of the bus to the host, nothing else at the time (assumed)."
        if self.passes.itemsize > BYTES:
            yield "An update's products of float32 numbers are taken at bfloat16's rate, which is too fast."
        experts = self.built.order.model.experts
        tokens = self.passes.rows(self.shapes[-1]).tokens
        layout = self.trainer.layout
        platform = self.built.order.target.chip.platform
        if form := form_of_update(
            self.run.policy.compute.experts, experts, layout, platform, tokens
        ):
            yield f"{form[0].upper()}{form[1:]}."
        yield "Reward functions, packing and what a host takes to launch an update's programs are in no iteration."

    @property
    def run(self) -> ProgramChoice:
        return self.built.order.run

    @property
    def trainer(self) -> Trainer:
        return self.built.whole.policy

    @property
    def shapes(self) -> Sequence[Shape]:
        return self.built.micro_shapes

    @cached_property
    def passes(self) -> RolePasses:
        """The passes of the policy."""
        role = self.built.whole.models[POLICY].role
        return RolePasses(self.built, role, self.trainer.trained)

    @property
    def work(self) -> UpdateWork:
        return self.passes.work

    def transfer(self, target: Split) -> Seconds:
        """Returns the seconds to send weights to the rollout's layout `target`, with checksums."""
        weights = self.built.alone.weights
        source = self.trainer.layout.split
        params = shard_bytes(self.trainer.trained.abstract_frozen)
        params += shard_bytes(self.trainer.abstract_params)
        work = transfer_work(params, weights[source], weights[target], self.work.fsdp)
        return self.passes.times.seconds(work) + self.passes.times.seconds(
            checksum_work(params, weights[target])
        )

    def _flops(self, lengths: np.ndarray, shared: np.ndarray) -> float:
        once = 0.0
        for role in self.built.whole.trained:
            lora = role.trained.lora
            adapters = lora.num_weights if lora else None
            model = role.policy.config
            once += training_flops(model, lengths, shared, adapter_weights=adapters)
        return self.run.algorithm.num_iterations * once

    def _most_needed(self, target: Split) -> UpdateMemory:
        """Returns the memory of the largest program of all trained roles, and what would help if it
        does not fit. One of the programs is the transfer to `target`."""
        roles = self.built.whole
        found = []
        for trainer in roles.trained:
            role = "" if trainer is roles.policy else CRITIC
            own = [program for program in self.programs if program.role == role]
            of_role = roles.models[trainer.title].role
            passes = replace(self.passes, role=of_role, held=trainer.trained)
            found.append(_memory(self.built, trainer, passes, own, self.options, target))
        return max(found, key=lambda memory: memory.total)


def _memory(
    built: TargetBuild,
    trainer: Trainer,
    passes: RolePasses,
    programs: Sequence[CompiledProgram],
    options: MemoryOptions,
    target: Split,
) -> UpdateMemory:
    limit = int(built.limit)
    offloaded = fetched_bytes(trainer)
    taken = _taken_bytes(programs, target)
    if is_least := not any(key.name == "grad" for key in taken):
        taken |= _least_taken(built.whole.models[trainer.title], trainer, passes)
    most = largest(stages_of(trainer, taken))
    is_transfer = "transfer" in most.name
    resident = resting_bytes(trainer) if is_transfer else resident_bytes(trainer)
    holds_gradients = most.held > resident and not is_transfer
    gradients = shard_bytes(trainer.trained.abstract_gradients) if holds_gradients else 0
    params, state = shard_bytes(trainer.abstract_params), shard_bytes(trainer.state_in_a_step)
    absent = 0 if most.name == STEP else offloaded
    reader = built.whole.readers.get(REFERENCE)
    reference = shard_bytes(reader.resident) if reader else 0
    if trainer.name == CRITIC:
        most = replace(most, name=f"{most.name} of the critic")
    return UpdateMemory(
        most.name,
        params,
        state - params - absent,
        gradients,
        reference,
        shard_bytes(trainer.own_base),  # one of another role is among the others
        most.total - resident - gradients - (offloaded - absent),
        is_least,
        limit,
        shortage(most, limit, options, is_least=is_least),
        tightness(most, limit, options),
        offloaded,
        most.drafts,
        sum(map(shard_bytes, trainer.others)) - reference,
    )


def _taken_bytes(programs: Sequence[CompiledProgram], target: Split) -> dict[Key, int]:
    """Returns the bytes that each program takes; of the transfers, only that to `target`."""
    return {
        Key(p.name, p.split, p.rows, p.length, p.target): p.taken_bytes
        for p in programs
        if not p.error and (p.name != "transfer" or p.target == target)
    }


def _least_taken(model: RoleModel, trainer: Trainer, passes: RolePasses) -> dict[Key, int]:
    """Returns the least bytes of an update's programs, for when its gradients were not compiled."""
    # Offloaded moments, which come for the step alone, may take more than was freed before.
    gradients = shard_bytes(trainer.trained.abstract_gradients)
    split = trainer.layout.split
    kept = kept_bytes(model, trainer, passes.role.compute.remat)
    key = Key("grad", split, *passes.shapes[-1])
    return {key: gradients + kept + _of_experts(passes), Key("apply", split): 0}


def _of_experts(passes: RolePasses) -> int:
    """Returns the bytes for experts in a layer's backward pass: rows of tokens that are sent to
    them, or the gathered experts and their gradients."""
    model = passes.model
    layout = passes.held.layout
    if not (layout.ep_dp_axes and model.experts):
        return 0
    tokens = passes.rows(passes.shapes[-1]).tokens
    if tokens <= passes.work.exchanged_tokens:
        rows = buffer_rows(tokens, model.experts, layout)
        return rows * model.expert_embed_dim * passes.itemsize
    of_layer = expert_weights(model) // len(model.sparse_layers)
    copies = 1 if passes.held.lora else 2
    return copies * passes.itemsize * of_layer // layout.size(layout.ep_tp_axes)
