"""What a rollout does next: decided on host state alone, by cases with a known answer."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from bursts import burst_output, retire
from schedulers import DP2, SHAPES, at, end, make_scheduler

from pat_jax.engine.executor import Burst, Collected
from pat_jax.engine.scheduler import Scheduler
from pat_jax.engine.sequences.page_allocator import NULL_PAGE
from pat_jax.engine.sequences.responses import Request, Responses
from pat_jax.engine.sequences.sequence_table import SequenceTable
from pat_jax.layout.buckets import Shapes
from pat_jax.planning.draft_counts import NONE_DRAFTED, DraftResult


@dataclass(frozen=True)
class SavedResponse:
    """What a burst did to the rows: see `contents.RowsOutput`."""

    emitted: np.ndarray
    running: np.ndarray
    steps: int
    pages: np.ndarray
    running_steps: np.ndarray
    drafted: DraftResult


def one_size(rows: int) -> Shapes:
    return replace(SHAPES, buckets=replace(SHAPES.buckets, rows={DP2: (rows,)}))


def collect(scheduler: Scheduler, burst: Burst, steps: int) -> Collected:
    """A burst in which every running sequence has said so many tokens; row by row they draw their
    pages."""
    table, tables = scheduler.table, scheduler.cache_manager.tables
    rows = table.num_replicas * table.rows_per_replica
    emitted, pages = np.zeros(rows, int), np.full((rows, 8), NULL_PAGE, np.int32)
    emitted[table.row[table.running]] = steps
    drawn = [0, 0]
    for i in table.running.tolist():
        row = int(table.row[i])
        replica = row // table.rows_per_replica
        lacking = -(-(int(table.length[i]) - 1 + steps) // 4) - int(tables.count[i])
        for turn in range(lacking):
            pages[row, turn] = burst.reserved.pages[replica, drawn[replica]]
            drawn[replica] += 1
    assert (np.array(drawn) <= burst.reserved.filled).all()
    return scheduler.collect(
        SavedResponse(emitted, emitted > 0, steps, pages, emitted, NONE_DRAFTED)
    )


def test_a_burst_ends_for_those_that_wait_when_an_eighth_of_the_fullest_group_is_free():
    scheduler = make_scheduler(20, one_size(8))
    assert len(scheduler.table.waiting) == 4
    assert scheduler.burst(at(0)).threshold == 8 - 1
    scheduler = make_scheduler(20, one_size(9), rows=9)
    assert len(scheduler.table.waiting) == 2
    assert scheduler.burst(at(0)).threshold == 9 - 2
    assert make_scheduler(16, one_size(8)).burst(at(0)).threshold == 0, "nobody waits"
    scheduler = make_scheduler(20, one_size(8))
    end(scheduler, kept=1)
    assert scheduler.table.fullest == 1 and scheduler.burst(at(0)).threshold == 0


@pytest.mark.parametrize(
    "running, planned, threshold",
    [(8, 0, 4), (8, 3, 4), (8, 6, 6), (8, 9, 7), (4, 0, 2), (2, 0, 0), (1, 5, 0)],
)
def test_a_burst_ends_where_rows_can_be_compacted_or_the_plan_says(running, planned, threshold):
    """Buckets of 2, 4 and 8 rows; as long as it ends at all after a step."""
    scheduler = make_scheduler(2 * running)
    scheduler.fit()
    assert scheduler.burst(at(planned)).threshold == threshold


def test_rows_are_the_smallest_bucket_that_holds_the_fullest_group():
    scheduler = make_scheduler(16)
    for kept, rows in ((5, 8), (4, 4), (3, 4), (1, 2)):
        end(scheduler, kept)
        scheduler.fit()
        assert (scheduler.table.fullest, scheduler.table.rows_per_replica) == (kept, rows)
        scheduler.check_integrity()


def test_a_burst_is_as_long_as_its_length_bucket_has_room_for():
    """6 tokens of 65: bursts of 16 up to the bucket of 32, in whole tests, then in that of 64."""
    scheduler, seen = make_scheduler(2, prompt=6), []
    for _ in range(4):
        scheduler.fit()
        burst = scheduler.burst(at(0))
        seen.append((scheduler.table.max_context, burst.shape.length, burst.max_steps))
        collect(scheduler, burst, burst.max_steps)
    # At 21 tokens there is room for two tests and a part of a third.
    assert seen == [(5, 32, 16), (21, 32, 8), (29, 64, 16), (45, 64, 16)]


def test_before_a_burst_there_is_room_for_half_of_it():
    """Two in each replica: 8 steps are enough, or the younger one makes room."""
    shapes = replace(SHAPES, pages={DP2: 1 + 16})
    scheduler = make_scheduler(4, shapes)
    tables = scheduler.cache_manager.tables
    assert tables.count.tolist() == [2] * 4, "for the first test"
    # 24 + 8 tokens are eight pages each, all that there are; 28 + 8 are nine.
    for context, pages in ((16, [5, 5, 5, 5]), (24, [7, 7, 7, 7]), (28, [8, 8, 0, 0])):
        scheduler.fit()
        collect(scheduler, scheduler.burst(at(0)), context - scheduler.table.max_context)
        assert scheduler.num_preempted == 0 and scheduler.table.max_context == context
        scheduler.admit()
        assert tables.count.tolist() == pages
    assert scheduler.num_preempted == 2 and scheduler.table.waiting.tolist() == [2, 3]
    scheduler.check_integrity()


class TestBehind:
    def in_flight(self, count: int = 16) -> tuple[Scheduler, Burst]:
        scheduler = make_scheduler(count)
        scheduler.fit()
        return scheduler, scheduler.burst(at(0))

    def test_it_ends_where_the_one_before_it_does_or_at_a_newer_threshold(self):
        scheduler = make_scheduler(16)
        scheduler.fit()
        in_flight = scheduler.burst(at(5))
        assert in_flight.threshold == 5
        for planned, threshold in ((0, 5), (6, 6)):
            burst = scheduler.burst_behind(in_flight, at(planned))
            assert burst is not None and burst.is_ahead and not in_flight.is_ahead
            assert (burst.threshold, burst.shape) == (threshold, in_flight.shape)

    def test_not_before_rows_that_have_changed(self):
        scheduler, in_flight = self.in_flight()
        end(scheduler, kept=7)
        assert scheduler.table.rows_per_replica == 8, "though the bucket is the same"
        assert scheduler.burst_behind(in_flight, at(0)) is None

    def test_not_for_rows_to_be_compacted(self):
        scheduler, in_flight = self.in_flight()
        table = scheduler.table
        ended = np.isin(table.running, [i for g in range(2) for i in table.running[g::2][4:]])
        table.advance(np.ones(16, int), ~ended, 4)
        assert table.fullest == 4
        assert scheduler.burst_behind(in_flight, at(0)) is None

    def test_not_where_budgets_say_that_it_takes_no_step(self):
        scheduler, in_flight = self.in_flight()
        scheduler.table.end[:] = scheduler.table.length + in_flight.max_steps
        assert scheduler.burst_behind(in_flight, at(0)) is None

    def test_not_where_somebody_waits(self):
        scheduler, in_flight = self.in_flight(18)
        assert len(scheduler.table.waiting) == 2
        assert scheduler.burst_behind(in_flight, at(0)) is None

    def test_not_where_pages_are_too_few(self):
        """16 and 16 steps, in a pool that has pages for 28 tokens."""
        scheduler = make_scheduler(2, replace(SHAPES, pages={DP2: 1 + 16}))
        tables = scheduler.cache_manager.tables
        for pool in tables.pools:
            pool.take(16 - 2 - 5)
        scheduler.fit()
        in_flight = scheduler.burst(at(0))
        free = tables.free.copy()
        assert scheduler.burst_behind(in_flight, at(0)) is None
        assert tables.free.tolist() == free.tolist(), "nothing is laid out"


def make_request(number: int, prompt_length: int, max_new_tokens: int) -> Request:
    key = np.array([number, 7], np.uint32)
    return Request((number,) * prompt_length, key, max_new_tokens, prompt_id=90 - number // 2)


def dealt(requests: list[Request], num_replicas: int, rows: int) -> Responses:
    """Of sequences that are running, as many of them as there are rows; neighbours share a
    replica."""
    responses = Responses.of(requests, num_replicas=num_replicas, rows_per_replica=rows)
    each = min(rows, -(-len(requests) // num_replicas))
    replica = np.repeat(np.arange(num_replicas), each)[: len(requests)]
    responses.table.add(np.arange(len(replica)), replica)
    return responses


def make_table(count: int, num_replicas: int, rows: int) -> SequenceTable:
    return dealt([make_request(i, 2, 5) for i in range(count)], num_replicas, rows).table


def test_a_request_of_no_known_prompt_leaves_all_strangers():
    requests = [make_request(0, 2, 5), replace(make_request(1, 2, 5), prompt_id=None)]
    for some, is_known in ((requests[:1], True), (requests, False), ([], True)):
        table = Responses.of(some, num_replicas=1, rows_per_replica=2).table
        assert (table.load().prompt is not None) == is_known


@pytest.mark.parametrize(
    ("said", "ignore_eos", "is_truncated"),
    [([5, 0], False, False), ([5, 6], False, True), ([0, 6], False, True), ([5, 0], True, True)],
)
def test_a_completion_says_how_it_ended(said, ignore_eos, is_truncated):
    request = Request((1,), np.zeros(2, np.uint32), 2, ignore_eos=ignore_eos)
    responses = dealt([request], num_replicas=1, rows=1)
    table = responses.table
    tokens = np.array([said], np.int32)
    logprobs, goes_on = np.zeros((1, 2), np.float32), np.array([False])
    retire(responses, burst_output(tokens, logprobs, np.array([2]), goes_on))
    done = responses.completion(0, eos_ids=(0,))
    assert done.is_truncated == is_truncated
    assert not table.has_work and table.load().running == 0


@pytest.mark.parametrize("is_recomputed", [True, False])
def test_the_longest_sequences_go_to_different_groups(is_recomputed):
    requests = [make_request(i, prompt_length=1 + i, max_new_tokens=5) for i in range(4)]
    table = dealt(requests, num_replicas=1, rows=4).table
    replica = table.regroup(2, np.full(4, is_recomputed))
    assert replica.tolist() == [1, 0, 1, 0]  # longest first: 3, 2, 1, 0 in turns


def test_what_is_recomputed_fills_the_emptier_groups():
    """Replicas of 4, 0, 0, 0 merge by twos; two of the four may go elsewhere."""
    table = make_table(4, num_replicas=1, rows=4)
    table.assign_rows(np.zeros(4, int), num_replicas=4, rows_per_replica=4)
    replica = table.regroup(2, np.array([False, True, True, False]))
    assert replica.tolist() == [0, 1, 1, 0]
