"""What an update takes of a device of the target, and what would help where that is too much."""

from collections.abc import Sequence

import jax.numpy as jnp

from pat_jax.engine.sizing.memory import shard_bytes
from pat_jax.planning.types import Split
from pat_jax.profiling.capacity.update_report import UpdateMemory
from pat_jax.profiling.cross_compile.compiled import CompiledProgram
from pat_jax.profiling.cross_compile.plant import Plant
from pat_jax.programs.programs import Key
from pat_jax.training.trainer import Trainer
from pat_jax.training.update_memory import (
    STEP,
    UpdateOptions,
    largest,
    shortage,
    stages_of,
    tightness,
)


def update_memory(
    plant: Plant, programs: Sequence[CompiledProgram], options: UpdateOptions, target: Split
) -> UpdateMemory:
    """
    Args:
      target: that weights go to.
      programs: what the target's compiler made of it. Without gradients among them what these take at
        least is told: a micro-batch's own gradients, and each layer's input; or the optimizer's state.
      options: as the user knows them.
    """
    trainer, limit = plant.whole_trainer, int(plant.limit)
    params, offloaded = shard_bytes(trainer.abstract_params), shard_bytes(trainer.offloaded)
    resident = shard_bytes(trainer.resident_in_updates)
    added = shard_bytes(trainer.abstract_gradients)
    taken = {
        Key(p.name, p.split, p.rows, p.length, p.target): p.taken_bytes
        for p in programs
        if not p.error and (p.name != "transfer" or p.target == target)
    }
    is_least = not any(key.name == "grad" for key in taken)
    if is_least:
        key = Key("grad", trainer.layout.split, *plant.micro_shapes[-1])
        # Where moments come for the step alone, there may be more of them than of all that leaves before.
        taken |= {key: added + _inputs(plant, trainer), Key("apply", trainer.layout.split): 0}
    most = largest(stages_of(trainer, taken))
    gradients = added if most.held > resident and "transfer" not in most.name else 0
    optimizer = shard_bytes(trainer.state_in_a_step) - params
    absent = 0 if most.name == STEP else offloaded
    return UpdateMemory(
        most.name,
        params,
        optimizer - absent,
        gradients,
        params if trainer.has_reference else 0,
        shard_bytes(trainer.trained.abstract_frozen),
        most.total - resident - gradients - (offloaded - absent),
        is_least,
        limit,
        shortage(most, limit, options, is_least=is_least),
        tightness(most, limit, options),
        offloaded,
        most.drafts,
    )


def _inputs(plant: Plant, trainer: Trainer) -> int:
    """Bytes of each layer's input, which is kept for the backward pass whatever else is."""
    rows, length = plant.micro_shapes[-1]
    tokens, model = rows * length // trainer.layout.split.dp, trainer.policy.config
    return model.num_layers * tokens * model.embed_dim * jnp.dtype(plant.dtype).itemsize
