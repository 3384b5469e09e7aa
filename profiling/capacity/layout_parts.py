"""Makes the parts of a plan's report that list every layout: memory and decode steps.

Knows builds, programs and machines. Does not know rollouts.
"""

from collections.abc import Mapping

import numpy as np

from pat_jax.planning.types import Split
from pat_jax.profiling.capacity.costs import SourcedLatency
from pat_jax.profiling.capacity.report import LayoutMemory, Memory, StepTimes
from pat_jax.profiling.cross_compile.compiled import CompiledProgram
from pat_jax.profiling.cross_compile.target_build import TargetBuild
from pat_jax.profiling.simulate.machine import Machine

WHILE_DECODING = ("decode", "prefill")  # programs that run while weights and KV cache are there


def running_counts(sequences: int) -> tuple[int, ...]:
    """Returns the numbers of running sequences for which steps are reported."""
    return tuple(dict.fromkeys([*(1 << k for k in range(sequences.bit_length())), sequences]))


def memory_of(
    build: TargetBuild, refused: Mapping[Split, str], programs: tuple[CompiledProgram, ...]
) -> Memory:
    memory = build.memory
    rollout = build.order.run.rollout
    running = [one for one in programs if one.name in WHILE_DECODING and not one.error]
    # Bursts with drafts verify equally many tokens in every layout: compiled ones stand for all.
    drafting = max((one.taken_bytes for one in running if one.num_draft_tokens), default=0)
    beside = dict.fromkeys(build.layouts, drafting)
    for program in running:
        beside[program.split] = max(beside[program.split], program.taken_bytes)
    longest = np.array(rollout.max_length - 1)
    sequences = rollout.num_responses
    layouts = []
    for split in build.layouts:
        pages = split.dp * (memory.pages[split] - 1)
        whole = min(sequences, int(pages // memory.needed(np.array(1), longest)))
        weights = memory.weights[split]
        pool = memory.pool(split)
        why = refused.get(split, "")
        drafts = memory.drafts[split].source if programs else sum(memory.drafts[split])
        layouts.append(
            LayoutMemory(split, weights, memory.resident, pool, beside[split], whole, why, drafts)
        )
    return Memory(
        "compiler" if programs else "arithmetic",
        int(memory.limit),
        int(memory.usable),
        tuple(layouts),
        tuple(build.chain[1]),
    )


def steps_of(machine: Machine, costs: SourcedLatency, sequences: int) -> StepTimes:
    running = running_counts(sequences)
    lengths = machine.buckets.lengths
    contexts = tuple(dict.fromkeys((lengths[0], lengths[len(lengths) // 2], lengths[-1])))
    return StepTimes(
        costs.source,
        costs.explained,
        costs.range,
        machine.splits,
        running,
        contexts,
        tuple(
            tuple(
                tuple(_step(machine, split, n, context) for split in machine.splits)
                for n in running
            )
            for context in contexts
        ),
    )


def _step(machine: Machine, split: Split, running: int, context: int) -> float | None:
    if running < split.dp:
        return None
    rows = -(-running // split.dp)
    return machine.truth.decode_step(split, rows, context, running=running)
