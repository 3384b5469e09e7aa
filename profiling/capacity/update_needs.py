"""The memory of an update's largest program on a device, by parts.

If the program of gradients was not compiled, this is a lower bound: that program then counts as a
micro-batch's own gradients, each layer's input, and buffers of one layer's experts.
"""

from collections.abc import Sequence
from dataclasses import replace

from pat_jax.config.compute import MemoryOptions
from pat_jax.config.role_table import REFERENCE
from pat_jax.engine.sizing.memory import shard_bytes
from pat_jax.layout.exchange import buffer_rows
from pat_jax.planning.types import Split
from pat_jax.profiling.capacity.report import UpdateMemory
from pat_jax.profiling.capacity.role_passes import RolePasses
from pat_jax.profiling.cross_compile.compiled import CompiledProgram
from pat_jax.profiling.cross_compile.target_build import TargetBuild
from pat_jax.profiling.predict.model_sizes import expert_weights
from pat_jax.programs.programs import Key
from pat_jax.training.trainer import CRITIC, POLICY, Trainer
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


def most_needed(
    built: TargetBuild,
    programs: Sequence[CompiledProgram],
    policy: RolePasses,
    options: MemoryOptions,
    target: Split,
) -> UpdateMemory:
    """Returns the memory of the largest program of all trained roles, and what would help if it
    does not fit. One of the programs is the transfer to `target`."""
    found = []
    for trainer in built.whole.trained:
        role = "" if trainer.name == POLICY else CRITIC
        own = [program for program in programs if program.role == role]
        passes = replace(policy, role=built.whole.models[trainer.title].role, held=trainer.trained)
        found.append(_memory(built, trainer, passes, own, options, target))
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
        taken |= _least_taken(trainer, passes)
    most = largest(stages_of(trainer, taken))
    is_transfer = "transfer" in most.name
    resident = resting_bytes(trainer) if is_transfer else resident_bytes(trainer)
    holds_gradients = most.held > resident and not is_transfer
    gradients = shard_bytes(trainer.trained.abstract_gradients) if holds_gradients else 0
    params, state = shard_bytes(trainer.abstract_params), shard_bytes(trainer.state_in_a_step)
    absent = 0 if most.name == STEP else offloaded
    reference = _reference_bytes(built)
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


def _reference_bytes(built: TargetBuild) -> int:
    reader = built.whole.readers.get(REFERENCE)
    return shard_bytes(reader.resident) if reader else 0


def _least_taken(trainer: Trainer, passes: RolePasses) -> dict[Key, int]:
    """Returns the least bytes of an update's programs, for when its gradients were not compiled."""
    # Offloaded moments, which come for the step alone, may take more than was freed before.
    gradients = shard_bytes(trainer.trained.abstract_gradients)
    split = trainer.layout.split
    of_rows = _inputs_bytes(passes) + _of_experts(passes)
    key = Key("grad", split, *passes.shapes[-1])
    return {key: gradients + of_rows, Key("apply", split): 0}


def _inputs_bytes(passes: RolePasses) -> int:
    """Returns the bytes of the layers' inputs, which are always kept for the backward pass."""
    tokens = passes.rows(passes.shapes[-1]).tokens
    model = passes.model
    return model.num_layers * tokens * model.embed_dim * passes.itemsize


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
