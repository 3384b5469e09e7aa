"""Builds only the engine of rollouts, for sessions that generate and for profiles.

Knows models and layouts. Does not know data, nor what is trained.
"""

import logging
from collections.abc import Sequence
from typing import Any

from pat_jax.common.devices import Device
from pat_jax.common.hub import is_checkpoint
from pat_jax.config.engine import EngineChoice
from pat_jax.config.task import TaskChoice
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.sizing.layout_choice import (
    check_lengths,
    check_vocabulary_options,
)
from pat_jax.engine.sizing.memory_checks import layouts_without_memory
from pat_jax.models.config import ModelConfig
from pat_jax.models.kernels.kernel_choice import Kernels
from pat_jax.models.policy import Policy
from pat_jax.run.roles.placed_layouts import chain_of, rollout_layouts
from pat_jax.run.roles.rollouts import Rollouts, other_kernels
from pat_jax.run.roles.weights import check_weights
from pat_jax.run.start.setup import checked_tokenizer

log = logging.getLogger(__name__)


def build_engine(
    asked: EngineChoice,
    task: TaskChoice,
    model: ModelConfig,
    devices: Sequence[Device],
    resident: Sequence[Any] = (),
) -> RolloutEngine:
    """Builds the engine without the data of a run. `resident` has shapes and shardings of other
    arrays on the devices. Raises UserError as `build` does, except for the weights of the model,
    which not every caller needs."""
    engine = _built_engine(asked, task, model, devices, resident)
    scores = ("rows",) if asked.rollout.weights != "auto" else ()  # the gap to the full weights
    kernels = other_kernels(asked.rollout, engine, also=scores)
    if kernels is not None:
        engine = _built_engine(asked, task, model, devices, resident, kernels)
    check_weights(asked.speculation.draft_model, "speculation.source")
    return engine


def _built_engine(
    asked: EngineChoice,
    task: TaskChoice,
    model: ModelConfig,
    devices: Sequence[Device],
    resident: Sequence[Any],
    kernels: Kernels | None = None,
) -> RolloutEngine:
    check_lengths(asked.rollout, model, asked.model)
    check_vocabulary_options(asked.rollout, model)
    chain, dropped = chain_of(model, devices, asked.rollout, asked.fsdp_size, kernels)
    layouts = rollout_layouts(model, devices, asked.rollout, asked.layouts, chain)
    for reason in dropped:
        log.info("layout dropped: %s", reason)
    has_tokenizer = task.data.is_arithmetic or is_checkpoint(asked.model)
    eos_ids = checked_tokenizer(task, model).eos_ids if has_tokenizer else (0,)
    rollouts = Rollouts.of(asked, Policy.from_config(model), devices)
    alone = rollouts.memory_alone(layouts, resident)
    without_memory = layouts_without_memory(alone, asked.rollout)
    for split, reason in without_memory.items():
        log.info("layout dropped: %s: %s", split, reason)
    kept = {split: layout for split, layout in layouts.items() if split not in without_memory}
    return rollouts.engine(kept, eos_ids, resident)
