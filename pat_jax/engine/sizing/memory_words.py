"""The log lines about the memory of devices, before the first step and at the end of a run."""

import math
from collections.abc import Iterable

import numpy as np

from pat_jax.common.devices import Device
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.sizing.device_memory import peak_bytes
from pat_jax.planning.memory import USABLE, MemoryModel, gib


def describe_memory(memory: MemoryModel, config: RolloutConfig) -> list[str]:
    """Returns the log lines about memory before the first step."""
    sequences = config.prompts_per_step * config.num_generations
    lines = [
        "memory: this backend names no limit, so every layout is taken to fit "
        "(--rollout.device_memory_gib sets one)"
        if math.isinf(memory.limit)
        else f"memory of a device: {gib(memory.limit)}, {USABLE:.0%} of it to be used, training "
        f"state {gib(memory.resident)}"
    ]
    longest = np.array(config.max_length - 1)
    for split, weights in memory.weights.items():
        pages = split.dp * (memory.pages[split] - 1)
        whole = int(pages // memory.needed(np.array(1), longest))
        lines.append(
            f"memory in {split}: weights {gib(weights)}, KV cache {gib(memory.pool(split))} "
            f"({pages} pages of {memory.page_size} tokens, {min(whole, sequences)} of {sequences} "
            "sequences at full length)"
        )
        if source := memory.draft_sources.get(split):
            step = gib(memory.draft_steps[split])
            lines[-1] += f", drafts {gib(source)} and {step} while a step runs"
        if whole < sequences:
            lines[-1] += "; others wait or are preempted while it is full"
    return lines


def describe_peak(memory: MemoryModel, devices: Iterable[Device], update: str) -> str:
    """Returns the log line about peak memory at the end of a run.

    Args:
      update: the predicted memory of the update, in words.
    """
    if (peak := peak_bytes(devices)) is None:
        return "memory: this backend names no peak"
    split = max(memory.weights, key=memory.held)
    return (
        f"memory: at most {gib(peak)} of a device were in use; predicted were "
        f"{gib(memory.held(split))} for weights, KV cache and training state in {split}, the largest, "
        f"and for {update}"
    )
