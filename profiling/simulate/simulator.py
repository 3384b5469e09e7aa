"""Replays a rollout of known response lengths on a simulated clock, with the real planner and
scheduler.

Every duration is looked up in a latency model, `Machine.truth`; the planner may use another one.
What a latency model does not have takes no time, except for `Machine.host_s_per_sequence`. Pools
hold every sequence, or as much as fits into the machine's memory. `drafted.py` has the bursts with
drafts.
"""

from collections import deque
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from pat_jax.common.stopwatch import Stopwatch
from pat_jax.engine.executor import Arrival, Burst, Executor, Relocation
from pat_jax.engine.record.report import RolloutReport
from pat_jax.engine.rollout import rollout
from pat_jax.engine.scheduler import Scheduler
from pat_jax.engine.sequences.block_tables import BlockTables, turns
from pat_jax.engine.sequences.contents import Contents
from pat_jax.engine.sequences.page_allocator import NULL_PAGE
from pat_jax.engine.sequences.prefill_calls import Copies, PrefillWork, Spans
from pat_jax.engine.sequences.sequence_table import SequenceTable
from pat_jax.planning.draft_counts import NONE_DRAFTED, DraftResult
from pat_jax.planning.held import most_held
from pat_jax.planning.planner.balance import balance_seconds
from pat_jax.planning.planner.carry import carried_seconds
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.types import Split
from pat_jax.profiling.simulate.drafted import DraftedRows
from pat_jax.profiling.simulate.machine import Machine, Workload


def replay(workload: Workload, planner: Planner, machine: Machine) -> RolloutReport:
    """Runs one rollout to its end under `planner`, and returns its report."""
    split = planner.start(workload.load(machine.capacity))
    scheduler = waiting(workload, machine, split)
    tables = scheduler.cache_manager.tables
    executor = SimulatedExecutor(workload, machine, tables, split)
    report = RolloutReport(is_computed=True)
    for _ in rollout(scheduler, executor, planner, report):
        continue
    return report


def waiting(workload: Workload, machine: Machine, split: Split) -> Scheduler:
    """Returns the scheduler of a rollout that begins in `split`. All sequences wait."""
    table = SequenceTable(
        workload.prompts,
        np.full(workload.size, workload.cap),
        prompt_id=workload.prompt_id,
        num_replicas=split.dp,
        rows_per_replica=1,
    )
    shapes = machine.shapes(int(table.end.max(initial=1)))
    return Scheduler(Contents(table), shapes, split, runs_ahead=machine.runs_ahead)


@dataclass(frozen=True)
class SimulatedOutput:
    """The output of a burst, with the fields of `contents.RowsOutput`."""

    emitted: np.ndarray
    running: np.ndarray
    steps: int
    pages: np.ndarray
    running_steps: np.ndarray
    drafted: DraftResult


class SimulatedExecutor(Executor):
    def __init__(self, workload: Workload, machine: Machine, tables: BlockTables, split: Split):
        self.responses = workload.responses
        self.machine = machine
        self.tables = tables
        self.table = tables.table
        self.split = split
        self.now_s = 0.0
        self.clock = Stopwatch(lambda: self.now_s)
        self._running: deque[Burst] = deque()
        self._drawn = np.zeros(0, np.int64)  # pages drawn of each replica's reserve
        self._drafted = DraftedRows(machine, tables, workload.accepts)

    def prefill(self, work: PrefillWork) -> int:
        """Advances the clock by a prefill whose calls are as full as on the devices."""
        spans = work.spans
        truth = self.machine.truth
        if not len(spans.sequence):
            return 0
        self.now_s += truth.packed(self.split, spans.replica, spans.stop - spans.start)
        return self._room(spans)

    def _room(self, spans: Spans) -> int:
        """Returns the tokens for which the pages of `spans` have room."""
        size = self.tables.page_size
        return int((-(-(spans.stop - spans.start) // size)).sum()) * size

    def scrub(self, poisoned: Copies) -> None:
        assert not len(poisoned.replica), "no logits, no NaNs"

    def launch(self, burst: Burst) -> None:
        if not burst.is_ahead:
            self._drawn = np.zeros(burst.shape[0].dp, np.int64)
        self._drafted.note_begun()
        self._running.append(burst)

    def collect(self) -> tuple[SimulatedOutput, bool]:
        burst = self._running.popleft()
        table = self.table
        running = table.running
        left = self.responses[running] - (table.length - table.prompt_length)[running]
        in_reserve = np.asarray(burst.reserved.filled) - self._drawn
        if burst.shape.num_draft_tokens:
            went = self._drafted.run(burst, left, in_reserve)
            steps, generated, running_steps, more, drafted = went
        else:
            steps, more = self._plain_steps(burst, left, in_reserve)
            generated = running_steps = np.minimum(left, steps)
            drafted = NONE_DRAFTED
        rows = table.num_replicas * table.rows_per_replica
        emitted, goes_on, were_running = np.zeros((3, rows), np.int64)
        at = table.row[running]
        emitted[at] = generated
        goes_on[at] = left > generated
        were_running[at] = running_steps
        if steps:
            self.now_s += steps * self._step_s(burst, generated, running_steps, steps)
        pages = self._draw(burst, more)
        output = SimulatedOutput(emitted, goes_on > 0, steps, pages, were_running, drafted)
        return output, True

    def _step_s(
        self, burst: Burst, generated: np.ndarray, running_steps: np.ndarray, steps: int
    ) -> float:
        """Returns the seconds of a step of the burst, on average over its steps."""
        machine = self.machine
        table = self.table
        running = self.table.running
        split, rows, length, num_draft_tokens = burst.shape
        every = machine.pace(num_draft_tokens).check_every
        # As the scheduler counts: half of the tokens that drafts add, on average.
        context = table.length[running] - 1 + (generated - running_steps) / 2
        held = most_held(context, running_steps, table.replica(running), steps, every)
        truth = machine.truth.verifying(num_draft_tokens)
        mean = running_steps.sum() / steps
        step_s = fmean(truth.decode_step(split, rows, length, n, mean) for n in held.tolist())
        return step_s + machine.host_s_per_sequence * len(running)

    def _plain_steps(
        self, burst: Burst, left: np.ndarray, in_reserve: np.ndarray
    ) -> tuple[int, np.ndarray]:
        """Returns the steps of a burst without drafts, which ends when the reserve of pages is
        empty; and the pages that each row draws, int[running]."""
        table = self.table
        every = self.machine.check_every
        running = table.running
        replicas = table.num_replicas
        replica = table.replica(running)
        whole = -(-left // every) * every
        until_threshold = self._steps_until(burst.threshold, left)
        steps = min(burst.max_steps, -(-until_threshold // every) * every)
        while True:
            # A row that ends has drawn its pages up to the next test.
            tokens = table.length[running] - 1 + np.minimum(steps, whole)
            pages = -(-np.minimum(tokens, table.end[running] - 1) // self.tables.page_size)
            more = np.maximum(pages - self.tables.count[running], 0)
            if not steps or (np.bincount(replica, more, minlength=replicas) <= in_reserve).all():
                return steps, more if steps else np.zeros_like(more)
            steps -= every

    def _steps_until(self, threshold: int, left: np.ndarray) -> int:
        replica = self.table.replica(self.table.running)
        steps = 0
        for number in range(self.table.num_replicas):
            members = left[replica == number]
            if len(members) > threshold:
                at = len(members) - 1 - threshold
                steps = max(steps, int(np.partition(members, at)[at]))
        return steps

    def _draw(self, burst: Burst, more: np.ndarray) -> np.ndarray:
        """Returns the pages that each row draws from the reserve, int32[rows, most of a row], in
        the order in which devices draw them."""
        table = self.table
        ring = np.asarray(burst.reserved.pages)
        rows = table.num_replicas * table.rows_per_replica
        counts = np.zeros(rows, np.int64)
        counts[table.row[table.running]] = more
        by_replica = counts.reshape(table.num_replicas, -1)
        first = (by_replica.cumsum(axis=1) - by_replica + self._drawn[:, None]).reshape(-1)
        row = np.repeat(np.arange(rows), counts)
        turn = turns(counts)
        pages = np.full((rows, int(counts.max(initial=0))), NULL_PAGE, np.int32)
        at = (first[row] + turn) % ring.shape[1]
        pages[row, turn] = ring[row // table.rows_per_replica, at]
        self._drawn += by_replica.sum(axis=1)
        return pages

    def relocate(self, relocation: Relocation) -> Arrival:
        truth = self.machine.truth
        source = relocation.source
        self.split = relocation.target
        if source != self.split:
            self.now_s += truth.reshard_table[source, self.split]
        else:
            self.now_s += balance_seconds(truth, source, relocation.load, relocation.replica)
        return Arrival()

    def recompute(self, relocation: Relocation, work: PrefillWork, waits: np.ndarray) -> int:
        """Advances the clock by the seconds to carry all sequences, those that migrate included."""
        source = relocation.source
        target = relocation.target
        if source == target:
            return 0  # all came along
        self.now_s += carried_seconds(
            self.machine.truth, source, target, relocation.load, relocation.is_left, ~waits
        )
        return self._room(work.spans)

    def release(self) -> None:
        self._running.clear()
