"""A made-up machine and workloads that its replays share, and what a static replay must take."""

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.sequences.prefill_calls import Spans, prefill_calls
from pat_jax.planning.memory import MemoryModel
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.types import MIGRATE_ALL, Load, Plan, Reads, Split
from pat_jax.profiling.simulate.machine import Machine, Workload
from tests.fakes import SPLITS, made_up_machine

CAP, LONGEST_PROMPT, CAPACITY = 150, 40, 40
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
    reshard=0.2,
    migrate_per_token=1e-3,
    prefill=1.0,
    reads: Reads = "bucket",
    **costs: float | None,
) -> Machine:
    machine = made_up_machine(
        CONFIG,
        CAPACITY,
        (32, 64, 128, 192),
        step,
        per_row=per_row,
        reshard=reshard,
        migrate_per_token=migrate_per_token,
        prefill=prefill,
        **costs,
    )
    return replace(machine, truth=replace(machine.truth, reads=reads))


MACHINE = make_machine()


def make_workload(seed: int, size: int = 32, samples: int = 0, longest: int = 20) -> Workload:
    """`samples` of each prompt, which say so; 0: prompts are strangers."""
    rng = np.random.default_rng(seed)
    responses = np.clip(rng.lognormal(3, 1, size).astype(int), 1, CAP)
    prompts = rng.integers(1, longest + 1, size)
    if not samples:
        return Workload(prompts, responses, CAP)
    of = np.arange(size) // samples
    return Workload(prompts[of], responses, CAP, of)


seeds, sizes = st.integers(0, 10_000), st.integers(1, CAPACITY)
workloads = st.builds(make_workload, seeds, sizes)
# With prompts of several pages, and several samples of each.
grouped = st.builds(make_workload, seeds, sizes, st.integers(0, 6), st.just(LONGEST_PROMPT))
# More than there are rows for.
queued = st.builds(
    make_workload, seeds, st.integers(1, 3 * CAPACITY), st.integers(0, 6), st.just(LONGEST_PROMPT)
)
machines = st.builds(
    make_machine,
    st.tuples(*[st.floats(0.05, 1.0)] * 4),
    st.floats(0, 0.1),
    st.floats(0, 5),
    st.floats(0, 0.01),
    st.floats(0.01, 3),
    st.sampled_from(["bucket", "held"]),
    shift_per_token=st.none() | st.floats(1e-4, 1.0),
)


def static_seconds(workload: Workload, split: Split, machine: Machine = MACHINE) -> float:
    """Step by step: the fullest group's running rows in their bucket, the longest cache in its own.

    Or what the group that holds most reads, each sequence its own tokens and the newest.
    """
    buckets, latency = machine.buckets, machine.truth
    replica = dealt(workload, split, machine)
    total = prefill_seconds(workload, split, replica, machine)
    for step in range(0, int(workload.responses.max()), machine.check_every):
        is_running = workload.responses > step
        fullest = int(np.bincount(replica[is_running]).max())
        needed = min(
            int((workload.prompts + workload.cap)[is_running].max()) - 1,
            int(workload.prompts[is_running].max()) + step - 1 + machine.check_every,
        )
        length = buckets.length_for(needed)
        rows = buckets.rows_for(split, fullest)
        read = np.zeros(split.dp)
        for at in range(step, step + machine.check_every):
            is_generated = workload.responses > at
            read += np.bincount(
                replica[is_generated], (workload.prompts + at)[is_generated], split.dp
            )
        held = read.max() / machine.check_every
        total += machine.check_every * latency.decode_step(split, rows, length, held)
    return total


def dealt(workload: Workload, split: Split, machine: Machine = MACHINE) -> np.ndarray:
    """The group of each sequence, int[sequences]: the one that holds fewest pages, with room for a burst,
    but that of its siblings as long as that is not full."""
    size, even = machine.truth.page_size, -(-workload.size // split.dp)
    replica, held, members = (
        np.full(workload.size, -1),
        np.zeros(split.dp, int),
        [set() for _ in range(split.dp)],
    )
    known = workload.prompt_id
    prompt = (np.arange(workload.size) if known is None else known).tolist()
    home: dict[int, int] = {}

    def put(i: int, open_groups: list[int]) -> None:
        g = min(open_groups, key=lambda g: held[g])
        cached = int(workload.prompts[i]) - 1
        held[g] += -(-(cached + min(machine.burst_steps, workload.cap)) // size)
        if known is not None and prompt[i] in {prompt[j] for j in members[g]}:
            held[g] -= cached // size
        members[g].add(i)
        replica[i] = home[prompt[i]] = g

    late = []
    for i in range(workload.size):
        not_full = [g for g in range(split.dp) if len(members[g]) < even]
        at_home = [g for g in not_full if home.get(prompt[i], g) == g]
        put(i, at_home) if at_home else late.append(i)
    for i in late:
        put(i, [g for g in range(split.dp) if len(members[g]) < even])
    return replica


def prefill_seconds(
    workload: Workload, split: Split, replica: np.ndarray, machine: Machine = MACHINE
) -> float:
    """The engine's own calls, each priced by the longest context in it."""
    latency, every = machine.truth, np.arange(workload.size)
    if workload.prompt_id is not None:  # samples of a prompt in one group share its pages
        pairs = np.stack([replica, workload.prompt_id])
        every = np.sort(np.unique(pairs, axis=1, return_index=True)[1])
    spans = Spans(every, replica[every], 0 * every, workload.prompts[every] - 1)
    sizes = latency.prefill_blocks, latency.prefill_blocks
    calls = prefill_calls(spans, num_replicas=split.dp, sizes=sizes, page_size=latency.page_size)
    return sum(latency.prefill_call(split, call.context) for call in calls)


@dataclass
class AtSteps(Planner):
    """Switches at given decode steps, whatever is running."""

    first: Split
    switches: tuple[tuple[int, Split], ...]
    recompute_below: int = MIGRATE_ALL

    def start(self, load: Load) -> Split:
        return self.first

    def decide(self, load: Load, current: Split, options=()) -> Plan:
        step = int(load.generated.max())
        due = [split for at, split in self.switches if at <= step]
        split = due[-1] if due else self.first
        return Plan(split, threshold=0, recompute_below=self.recompute_below)


def in_short_bursts(machine: Machine) -> Machine:
    return replace(machine, burst_steps=machine.check_every)


def with_pools(machine: Machine, pages: int) -> Machine:
    """Pages of 16 tokens, so many where KV heads are not split."""
    memory = MemoryModel(
        limit=1e9,
        resident=0,
        weights=dict.fromkeys(SPLITS, 1),
        page={split: 8 // split.tp for split in SPLITS},
        pages={split: pages * split.tp for split in SPLITS},
        page_size=16,
        chunk=1,
        staging=1,
        ahead=machine.check_every,
    )
    return replace(machine, memory=memory)
