"""A made-up machine and workloads that its replays share, and what a static replay must take."""

from dataclasses import dataclass, replace

import numpy as np
from fakes import made_up_machine
from hypothesis import strategies as st

from pat_jax.config import RolloutConfig
from pat_jax.planning.planner import Planner
from pat_jax.planning.types import MIGRATE_ALL, Load, Plan, Split
from pat_jax.profiling.machine import Machine, Workload

CAP, LONGEST_PROMPT, CAPACITY = 150, 20, 40
CONFIG = replace(
    RolloutConfig(),
    max_prompt_length=LONGEST_PROMPT,
    max_completion_length=CAP,
    min_rows=1,
    min_length=32,
    burst_steps=32,
)


def make_machine(
    step=(0.5, 0.4, 0.3, 0.25),
    per_row=0.02,
    reslice=0.2,
    migrate_per_token=1e-3,
    prefill=1.0,
    **costs: float | None,
) -> Machine:
    return made_up_machine(
        CONFIG,
        CAPACITY,
        (32, 64, 128, 192),
        step,
        per_row=per_row,
        reslice=reslice,
        migrate_per_token=migrate_per_token,
        prefill=prefill,
        **costs,
    )


MACHINE = make_machine()


def make_workload(seed: int, size: int = 32) -> Workload:
    rng = np.random.default_rng(seed)
    responses = np.clip(rng.lognormal(3, 1, size).astype(int), 1, CAP)
    return Workload(rng.integers(1, LONGEST_PROMPT + 1, size), responses, CAP)


workloads = st.builds(make_workload, st.integers(0, 10_000), st.integers(1, CAPACITY))
machines = st.builds(
    make_machine,
    st.tuples(*[st.floats(0.05, 1.0)] * 4),
    st.floats(0, 0.1),
    st.floats(0, 5),
    st.floats(0, 0.01),
    st.floats(0.01, 3),
    shift_per_token=st.none() | st.floats(1e-4, 1.0),
)


def static_seconds(workload: Workload, split: Split, machine: Machine = MACHINE) -> float:
    """Step by step: the fullest group's live rows in their bucket, the longest cache in its own."""
    buckets, latency = machine.buckets, machine.truth
    per_group = -(-workload.size // split.dp)
    group = np.arange(workload.size) // per_group
    total = latency.recompute(split, per_group, int(workload.prompts.max()))
    for step in range(0, int(workload.responses.max()), machine.check_every):
        is_live = workload.responses > step
        fullest = int(np.bincount(group[is_live]).max())
        needed = min(
            int((workload.prompts + workload.cap)[is_live].max()) - 1,
            int(workload.prompts[is_live].max()) + step - 1 + machine.check_every,
        )
        length = buckets.length_for(needed)
        rows = buckets.rows_for(split, fullest)
        total += machine.check_every * latency.decode_step(split, rows, length)
    return total


@dataclass
class AtSteps(Planner):
    """Switches at given decode steps, whatever is live."""

    first: Split
    switches: tuple[tuple[int, Split], ...]
    recompute_below: int = MIGRATE_ALL

    def start(self, load: Load) -> Split:
        return self.first

    def plan(self, load: Load, current: Split) -> Plan:
        step = int(load.generated.max())
        due = [split for at, split in self.switches if at <= step]
        split = due[-1] if due else self.first
        return Plan(split, threshold=0, recompute_below=self.recompute_below)


def in_short_bursts(machine: Machine) -> Machine:
    return replace(machine, burst_steps=machine.check_every)
