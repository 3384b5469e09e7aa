"""What a run's parts take of a device's memory, and whether a rollout fits at all.

Knows layouts, shardings and options. Does not know how a plan uses the answer.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pat_jax.config import RolloutConfig
from pat_jax.devices import Device
from pat_jax.engine.catalogue import Catalogue
from pat_jax.engine.rollout import RolloutEngine
from pat_jax.errors import UserError
from pat_jax.planning.memory import GIB, USABLE, MemoryModel
from pat_jax.planning.types import Split

log = logging.getLogger(__name__)


def memory_limit(config: RolloutConfig, devices: Sequence[Device]) -> float:
    """Bytes that every one of `devices` has; infinite where neither they nor the options say."""
    if config.device_memory_gib:
        return config.device_memory_gib * GIB
    limits = [(device.memory_stats() or {}).get("bytes_limit", math.inf) for device in devices]
    return min(limits)


def memory_model(
    catalogue: Catalogue, config: RolloutConfig, *, limit: float, resident: Any
) -> MemoryModel:
    """What the layouts of `catalogue` take of a device.

    Args:
      resident: a tree of shapes with shardings, of what stays on the devices during a rollout.
    """
    buckets, layouts = catalogue.buckets, catalogue.layouts.values()
    params = {layout.split: catalogue.params(layout) for layout in layouts}
    leaves = [x.size * x.dtype.itemsize for x in jax.tree.leaves(next(iter(params.values())))]
    return MemoryModel(
        limit=limit,
        resident=shard_bytes(resident),
        weights={split: shard_bytes(tree) for split, tree in params.items()},
        token={layout.split: shard_bytes(catalogue.cache(layout, 1, 1)) for layout in layouts},
        rows=buckets.rows,
        lengths=buckets.lengths,
        prefill_rows=config.prefill_rows,
        chunk=min(max(catalogue.reslice_chunk_bytes, *leaves), sum(leaves)),
        ahead=config.check_every,
    )


def engine_memory(engine: RolloutEngine, config: RolloutConfig) -> MemoryModel:
    """What the layouts take of a device where nothing is trained."""
    limit = memory_limit(config, list(engine.mesh.devices.flat))
    return memory_model(engine.catalogue, config, limit=limit, resident=())


def shard_bytes(tree: Any) -> int:
    """Bytes that one device holds of a tree of shapes with shardings, copies counted."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def can_begin(memory: MemoryModel, config: RolloutConfig, starts: Sequence[Split]) -> bool:
    """Whether a whole rollout can begin in one of these layouts."""
    size = config.prompts_per_step * config.num_generations, config.max_prompt_length
    return any(memory.starting(split, *size) <= memory.usable for split in starts)


def check_memory(
    memory: MemoryModel, config: RolloutConfig, starts: Sequence[Split], options: str
) -> None:
    """One of the layouts that a rollout may start in has to hold its start.

    Args:
      options: what has led to these layouts, such as "option --layout is 'auto'".

    Raises:
      UserError: none does.
    """
    if not can_begin(memory, config, starts):
        sequences, prompt = (
            config.prompts_per_step * config.num_generations,
            config.max_prompt_length,
        )
        needs = {split: memory.starting(split, sequences, prompt) for split in starts}
        best = min(needs, key=needs.__getitem__)
        need = needs[best]
        weights, resident = memory.weights[best], memory.resident
        raise UserError(
            f"{options}: {sequences} sequences with prompts of {prompt} tokens need {_gib(need)} of "
            f"a device in {best} (weights {_gib(weights)}, training state {_gib(resident)}, KV cache "
            f"{_gib(need - weights - resident)}), but "
            f"{_gib(memory.usable)} of its {_gib(memory.limit)} can be used; generate fewer "
            "(--rollout.prompts_per_step, --rollout.num_generations), shorten "
            "--rollout.max_prompt_length, or use more devices."
        )


def without_room(memory: MemoryModel) -> dict[Split, str]:
    """Layouts that cannot hold the smallest KV cache beside the weights, and why."""
    one = np.array(1)
    smallest = {split: int(memory.running(split, one, one)) for split in memory.weights}
    return {
        split: f"its weights take {_gib(memory.weights[split])} of a device, {_gib(need)} with the "
        f"training state and the smallest KV cache; {_gib(memory.usable)} can be used"
        for split, need in smallest.items()
        if need > memory.usable
    }


def describe_memory(memory: MemoryModel, config: RolloutConfig) -> list[str]:
    """What a run's log says of memory before the first step."""
    sequences = config.prompts_per_step * config.num_generations
    if math.isinf(memory.limit):
        return [
            "memory: this backend names no limit, so every layout is taken to fit "
            "(--rollout.device_memory_gib sets one)"
        ]
    lines = [
        f"memory of a device: {_gib(memory.limit)}, {USABLE:.0%} of it to be used, training state "
        f"{_gib(memory.resident)}"
    ]
    for split, weights in memory.weights.items():
        begin = memory.starting(split, sequences, config.max_prompt_length)
        lines.append(
            f"memory in {split}: weights {_gib(weights)}, {_gib(begin)} at the start, "
            f"{_gib(memory.ending(split, sequences))} if no sequence ended before its last token"
        )
    if min(memory.ending(split, sequences) for split in memory.weights) > memory.usable:
        lines.append(
            f"memory: no layout holds all {sequences} sequences at their full length; the run "
            "relies on most of them ending earlier"
        )
    return lines


def _gib(size: float) -> str:
    return f"{size / GIB:.3g} GiB"
