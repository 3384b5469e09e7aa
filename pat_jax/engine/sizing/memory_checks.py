"""Checks whether layouts fit in the memory of a device, and describes the memory in log lines.

Knows the memory that each layout takes. Does not know arrays.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from pat_jax.common.devices import Device
from pat_jax.common.errors import UserError
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.sizing.device_memory import peak_bytes
from pat_jax.planning.memory import USABLE, MemoryModel, gib
from pat_jax.planning.types import Split


def check_memory(memory: MemoryModel, starts: Sequence[Split], options: str) -> None:
    """Checks that at least one layout that a rollout may start in fits in memory. Raises UserError
    if none of them can hold its weights, pool, drafts and the training state.

    Args:
      memory: the memory that each layout takes if it is the only one, see `memory_alone`.
      starts: the layouts that a rollout may start in.
      options: the options that led to these layouts, such as "option --layout is 'auto'".
    """
    best = min(starts, key=memory.held)
    if memory.held(best) > memory.usable:
        drafted = memory.drafted(best)
        drafting = f", drafts {gib(drafted)}" if drafted else ""
        raise UserError(
            f"{options}: {best} needs {gib(memory.held(best))} of a device (weights "
            f"{gib(memory.weights[best])}, training state {gib(memory.resident)}, KV cache "
            f"{gib(memory.pool(best))} for {memory.pages[best]} pages of {memory.page_size} "
            f"tokens{drafting}), but {gib(memory.usable)} of its {gib(memory.limit)} can be used; allow "
            "shorter prompts and responses (the longest sequence has to fit alone), fewer "
            "--rollout.kv_pages if given, take --compute_dtype bfloat16 or --rollout.weights int8, "
            + "make no drafts (--speculation.source none), " * bool(drafted)
            + "or use more devices."
        )


def layouts_without_memory(memory: MemoryModel, config: RolloutConfig) -> dict[Split, str]:
    """Returns the layouts that leave too little room for the KV cache beside the weights, and why.

    The pools of all kept layouts take the same bytes: what the layout with the least free memory
    allows. So a layout that cannot hold the prompts of a rollout is left out if another can.

    Args:
      memory: the memory that each layout takes if it is the only one, see `memory_alone`.
    """
    sequences = config.num_responses
    prompt = config.max_prompt_length
    begin = {split: memory.starting(split, sequences, prompt) for split in memory.weights}
    fitting = [split for split in begin if memory.held(split) <= memory.usable]
    kept = [split for split in fitting if begin[split] <= memory.usable] or fitting
    return {
        split: f"its weights take {gib(memory.weights[split])} of a device, "
        f"{gib(max(need, memory.held(split)))} with the training state{_drafts_words(memory, split)} and the "
        f"smallest KV cache; {gib(memory.usable)} can be used"
        for split, need in begin.items()
        if split not in kept
    }


def _drafts_words(memory: MemoryModel, split: Split) -> str:
    if not (drafted := memory.drafted(split)):
        return ""
    return f", drafts ({gib(drafted)}, none with --speculation.source none)"


def describe_memory(memory: MemoryModel, config: RolloutConfig) -> list[str]:
    """Returns the log lines about memory before the first step."""
    sequences = config.num_responses
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
        if (drafts := memory.drafts.get(split)) and drafts.source:
            step = gib(drafts.steps)
            lines[-1] += f", drafts {gib(drafts.source)} and {step} while a step runs"
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
