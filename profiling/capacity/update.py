"""Predicts the update of an iteration on a target: its seconds, its memory, its utilisation.

The trainer's own code packs the batches from the replayed lengths. The work of a program is counted
in what the target's compiler made of it for the largest micro-batch; without compilation it is
arithmetic. Smaller micro-batches scale that work by arithmetic.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

import jax.numpy as jnp
import numpy as np

from pat_jax.common.text_table import percent
from pat_jax.config.run import RunConfig
from pat_jax.engine.sizing.memory import shard_bytes
from pat_jax.layout.exchange import buffer_rows, form_of_update, most_exchanged
from pat_jax.planning.types import Split
from pat_jax.profiling.capacity.update_batches import Packed
from pat_jax.profiling.capacity.update_report import Batches, Update, UpdateMemory
from pat_jax.profiling.cross_compile.compiled import CompiledProgram
from pat_jax.profiling.cross_compile.target_build import TargetBuild
from pat_jax.profiling.predict.composer import Composer
from pat_jax.profiling.predict.kernel_model import BYTES
from pat_jax.profiling.predict.model_sizes import expert_weights
from pat_jax.profiling.predict.sources import kernels_for
from pat_jax.profiling.predict.update_times import ATTENTION, Seconds, UpdateTimes
from pat_jax.profiling.predict.update_work import (
    Rows,
    UpdateWork,
    Work,
    apply_work,
    checksum_work,
    transfer_work,
)
from pat_jax.profiling.simulate.machine import Workload
from pat_jax.programs.programs import Key
from pat_jax.rl.batches.packing import Shape
from pat_jax.training.build import logit_tokens, shares_prompts
from pat_jax.training.model_flops import training_flops
from pat_jax.training.trainer import Trainer
from pat_jax.training.update_memory import (
    STEP,
    UpdateOptions,
    fetched_bytes,
    largest,
    resident_bytes,
    shortage,
    stages_of,
    tightness,
)


@dataclass(frozen=True)
class PlannedUpdate:
    """Predicts the update of one run on one target."""

    built: TargetBuild
    data: Path | None  # a folder with kernel tables
    programs: Sequence[CompiledProgram]  # empty: nothing was compiled
    options: UpdateOptions  # under the names that the user knows

    def of(self, workloads: Sequence[Workload], target: Split) -> Update:
        """The update for rollouts that begin in the layout `target`."""
        size = self.run.algorithm.mini_batch_size * self.run.rollout.num_generations
        is_shared = shares_prompts(self.run, self.trainer.layout.platform)
        packed = [
            Packed.of(each, size, self.shapes, self.work.dp, shares_prompts=is_shared)
            for each in workloads
        ]
        lengths = [each.prompts + each.responses for each in workloads]
        scoring, gradients = (
            sum((self._pass(name, each) for each in packed), Seconds()).times(1 / len(packed))
            for name in ("predict", "grad")
        )
        apply = self.times.seconds(self._apply).times(self.run.updates_per_step)
        flops = fmean(map(self._flops, lengths, (np.array(each.shared) for each in packed)))
        peak = self.built.order.target.num_devices * self.built.order.target.chip.flops_s
        return Update(
            self.trainer.layout.split,
            self.work.fsdp,
            self._predicting,
            "compiler" if self._find("grad") else "arithmetic",
            self._batches(lengths, packed),
            scoring,
            gradients,
            apply,
            self._transfer(target),
            target,
            flops,
            flops / (scoring.total + gradients.total + apply.total) / peak,
            self._memory(target),
        )

    @property
    def _predicting(self) -> tuple[str, ...]:
        """The policies whose log-probabilities are taken before the first step."""
        own = ("the policy before its first step",) * self.trainer.predicts
        return (*own, *(f"the {name}" for name in self.built.whole.readers))

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
        """The assumptions, in sentences."""
        yield (
            "Gradients multiply as fast as the forward pass, and attention in training reaches "
            f"{percent(ATTENTION[self.built.order.target.chip.name])} of the peak (assumed)."
        )
        if self.run.optimizer.offload:
            yield "Moments travel at the published rate of the bus to the host, nothing else at the time (assumed)."
        if self.itemsize > BYTES:
            yield "An update's products of float32 numbers are taken at bfloat16's rate, which is too fast."
        experts, tokens = self.built.order.model.experts, self._rows(self.shapes[-1]).tokens
        layout, platform = self.trainer.layout, self.built.order.target.chip.platform
        if form := form_of_update(self.run.experts, experts, layout, platform, tokens):
            yield f"{form[0].upper()}{form[1:]}."
        if self.built.order.model.experts and self._find("grad"):
            yield (
                "What an update's experts compute depends on its tokens, and no compiler counts it: operations "
                "and bytes of its passes are arithmetic."
            )
        yield "Rewards, packing and what a host takes to launch an update's programs are in no iteration."

    @property
    def run(self) -> RunConfig:
        return self.built.order.config

    @property
    def trainer(self) -> Trainer:
        return self.built.whole.policy

    @property
    def itemsize(self) -> int:
        """Bytes of a number of the forward pass."""
        return jnp.dtype(self.built.dtype).itemsize

    @property
    def shapes(self) -> Sequence[Shape]:
        return self.built.micro_shapes

    @cached_property
    def work(self) -> UpdateWork:
        layout, lora = self.trainer.layout, self.trainer.trained.lora
        platform, experts = self.built.order.target.chip.platform, self.built.order.model.experts
        return UpdateWork(
            self.built.order.model,
            layout.split.dp,
            layout.size(layout.fsdp_axes),
            self.run.remat,
            lora.num_weights if lora else None,
            self.itemsize,
            logit_tokens(self.trainer.policy, layout) if platform == "cuda" else 0,
            most_exchanged(self.run.experts, experts, layout, platform),
            layout.size(layout.ep_dp_axes),
        )

    @cached_property
    def times(self) -> UpdateTimes:
        target = self.built.order.target
        kernels = kernels_for(target, self.data, sums="nccl")
        return UpdateTimes(Composer(kernels, self.built.order.model), target)

    def _pass(self, name: str, packed: Packed) -> Seconds:
        spent = Seconds()
        for shape, pairs in zip(packed.shapes, packed.pairs, strict=True):
            rows = self._rows(shape, pairs)
            spent += self.times.seconds(self._work(name, rows), rows.tokens)
        repeated = self.run.algorithm.num_iterations if name == "grad" else 1
        return spent.times(repeated)

    def _rows(self, shape: Shape, pairs: float = 0.0) -> Rows:
        return Rows(shape[0] * shape[1] // self.work.dp, pairs)

    def _work(self, name: str, rows: Rows) -> Work:
        def of(rows: Rows) -> Work:
            if name == "grad":
                return self.work.gradients(rows)
            return self.work.scores(rows).times(len(self._predicting))

        work, program = of(rows), self._find(name)
        if program is None:
            return work
        if self.built.order.model.experts:
            return replace(work, sent=program.collectives)
        most = of(self._rows(self.shapes[-1]))
        return replace(  # a compiler's counts lack kernels of attention
            work,
            flops=program.flops * work.flops / most.flops,
            num_bytes=_moved(program) * work.num_bytes / most.num_bytes,
            sent=program.collectives,
        )

    @property
    def _apply(self) -> Work:
        params, state = self._bytes
        gradients = shard_bytes(self.trainer.trained.abstract_gradients)
        offloaded = fetched_bytes(self.trainer)
        by_hand = apply_work(params, gradients, state - params, offloaded=offloaded)
        program = self._find("apply")
        if program is None:
            return by_hand
        # A program of its own writes zeros: too small to be compiled for a plan.
        num_bytes = _moved(program) + gradients
        return replace(by_hand, num_bytes=num_bytes, sent=program.collectives)

    def _transfer(self, target: Split) -> Seconds:
        """Seconds of transfer and checksums. The program for the layout with the least TP stands
        for those that were not compiled: weights are gathered before they are cut."""
        weights, source = self.built.alone.weights, self.trainer.layout.split
        params = shard_bytes(self.trainer.trained.abstract_frozen) + self._bytes[0]
        whole, kept = weights[source], weights[target]
        work = transfer_work(params, whole, kept, self.work.fsdp)
        ends = {p.target: p for p in self.programs if p.name == "transfer" and not p.error}
        if program := ends.get(target) or ends.get(source):
            work = Work(num_bytes=_moved(program), sent=program.collectives)
        return self.times.seconds(work) + self.times.seconds(checksum_work(params, kept))

    def _memory(self, target: Split) -> UpdateMemory:
        """The memory of the update, with a transfer to `target`, and what would help if it is too
        much.

        If the program of gradients was not compiled, this is a lower bound: a micro-batch's own
        gradients, each layer's input, and buffers of a layer's experts; or the optimizer's state.
        """
        trainer, limit = self.trainer, int(self.built.limit)
        resident, offloaded = resident_bytes(trainer), fetched_bytes(trainer)
        added = shard_bytes(trainer.trained.abstract_gradients)
        taken = {
            Key(p.name, p.split, p.rows, p.length, p.target): p.taken_bytes
            for p in self.programs
            if not p.error and (p.name != "transfer" or p.target == target)
        }
        is_least = not any(key.name == "grad" for key in taken)
        if is_least:
            key = Key("grad", trainer.layout.split, *self.shapes[-1])
            # Offloaded moments, which come for the step alone, may take more than was freed before.
            of_rows = self._inputs + self._of_experts
            taken |= {key: added + of_rows, Key("apply", trainer.layout.split): 0}
        most = largest(stages_of(trainer, taken))
        gradients = added if most.held > resident and "transfer" not in most.name else 0
        params, state = self._bytes
        absent = 0 if most.name == STEP else offloaded
        return UpdateMemory(
            most.name,
            params,
            state - params - absent,
            gradients,
            sum(map(shard_bytes, trainer.others)),
            shard_bytes(trainer.trained.abstract_frozen),
            most.total - resident - gradients - (offloaded - absent),
            is_least,
            limit,
            shortage(most, limit, self.options, is_least=is_least),
            tightness(most, limit, self.options),
            offloaded,
            most.drafts,
        )

    @property
    def _inputs(self) -> int:
        """Bytes of the layers' inputs, which are always kept for the backward pass."""
        tokens, model = self._rows(self.shapes[-1]).tokens, self.trainer.policy.config
        return model.num_layers * tokens * model.embed_dim * self.itemsize

    @property
    def _of_experts(self) -> int:
        """Bytes of experts in the backward pass of a layer: rows of tokens that are sent to them,
        or the gathered experts and their gradients."""
        model, layout = self.built.order.model, self.trainer.layout
        if not (layout.ep_dp_axes and model.experts):
            return 0
        tokens = self._rows(self.shapes[-1]).tokens
        if tokens <= self.work.exchanged_tokens:
            rows = buffer_rows(tokens, model.experts, layout)
            return rows * model.expert_embed_dim * self.itemsize
        of_layer = expert_weights(model) // len(model.sparse_layers)
        copies = 1 if self.trainer.trained.lora else 2
        return copies * self.itemsize * of_layer // layout.size(layout.ep_tp_axes)

    @property
    def _bytes(self) -> tuple[int, int]:
        """Bytes of a device: of trained parameters, and of these with the optimizer's state."""
        trainer = self.trainer
        return shard_bytes(trainer.abstract_params), shard_bytes(trainer.state_in_a_step)

    def _find(self, name: str) -> CompiledProgram | None:
        return next((p for p in self.programs if p.name == name and not p.error), None)

    def _flops(self, lengths: np.ndarray, shared: np.ndarray) -> float:
        model, adapters = self.built.order.model, self.work.adapter_weights
        once = training_flops(model, lengths, shared, adapter_weights=adapters)
        return self.run.algorithm.num_iterations * once


def _moved(program: CompiledProgram) -> float:
    """Bytes that a program reads and writes outside of products."""
    return program.bytes_accessed - program.product_bytes
