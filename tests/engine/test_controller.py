"""What a rollout does next: decided on host state alone, by cases with a known answer."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from controllers import CAP, DP2, PROMPT, SHAPES, at, end, make_controller

from pat_jax.engine.controller import Burst, Collected, Controller
from pat_jax.engine.sequences.contents import Contents
from pat_jax.engine.sequences.page_allocator import NULL_PAGE
from pat_jax.engine.sequences.sequence_table import SequenceTable
from pat_jax.layout.buckets import Drafts, Shapes
from pat_jax.planning.drafts import NONE_DRAFTED


@dataclass(frozen=True)
class Said:
    """What a burst did to the rows: see `contents.RowsOutput`."""

    emitted: np.ndarray
    live: np.ndarray
    steps: int
    pages: np.ndarray
    live_steps: np.ndarray
    begun: np.ndarray
    tried: np.ndarray
    right: np.ndarray
    forks: np.ndarray
    verified: np.ndarray
    by_source: np.ndarray


def one_size(rows: int) -> Shapes:
    return replace(SHAPES, buckets=replace(SHAPES.buckets, rows={DP2: (rows,)}))


def collect(controller: Controller, burst: Burst, steps: int) -> Collected:
    """A burst in which every live sequence has said so many tokens; row by row they draw their pages."""
    table, tables = controller.table, controller.scheduler.tables
    rows = table.num_groups * table.rows_per_group
    emitted, pages = np.zeros(rows, int), np.full((rows, 8), NULL_PAGE, np.int32)
    emitted[table.row[table.live]] = steps
    drawn = [0, 0]
    for i in table.live.tolist():
        row = int(table.row[i])
        group = row // table.rows_per_group
        lacking = -(-(int(table.length[i]) - 1 + steps) // 4) - int(tables.count[i])
        for turn in range(lacking):
            pages[row, turn] = burst.reserved.pages[group, drawn[group]]
            drawn[group] += 1
    assert (np.array(drawn) <= burst.reserved.filled).all()
    return controller.collect(Said(emitted, emitted > 0, steps, pages, emitted, *NONE_DRAFTED))


def test_a_burst_ends_for_those_that_wait_when_an_eighth_of_the_fullest_group_is_free():
    controller = make_controller(20, one_size(8))
    assert len(controller.table.waiting) == 4
    assert controller.burst(at(0)).threshold == 8 - 1
    controller = make_controller(20, one_size(9), rows=9)
    assert len(controller.table.waiting) == 2
    assert controller.burst(at(0)).threshold == 9 - 2
    assert make_controller(16, one_size(8)).burst(at(0)).threshold == 0, "nobody waits"
    controller = make_controller(20, one_size(8))
    end(controller, kept=1)
    assert controller.table.fullest == 1 and controller.burst(at(0)).threshold == 0


@pytest.mark.parametrize(
    "live, planned, threshold",
    [(8, 0, 4), (8, 3, 4), (8, 6, 6), (8, 9, 7), (4, 0, 2), (2, 0, 0), (1, 5, 0)],
)
def test_a_burst_ends_where_rows_can_be_compacted_or_the_plan_says(live, planned, threshold):
    """Buckets of 2, 4 and 8 rows; as long as it ends at all after a step."""
    controller = make_controller(2 * live)
    controller.fit()
    assert controller.burst(at(planned)).threshold == threshold


def test_rows_are_the_smallest_bucket_that_holds_the_fullest_group():
    controller = make_controller(16)
    for kept, rows in ((5, 8), (4, 4), (3, 4), (1, 2)):
        end(controller, kept)
        controller.fit()
        assert (controller.table.fullest, controller.table.rows_per_group) == (kept, rows)
        controller.check_integrity()


def test_what_changes_no_row_leaves_the_copies_of_the_rows_as_they_are():
    controller = make_controller(16)
    version = controller.table.version
    controller.fit()
    controller.admit()
    collect(controller, controller.burst(at(0)), 4)
    controller.end(lambda i: False)
    controller.fit()
    assert controller.table.version == version
    end(controller, kept=7)
    assert controller.table.version > version


def test_a_burst_is_as_long_as_its_length_bucket_has_room_for():
    """6 tokens of 65: bursts of 16 up to the bucket of 32, in whole tests, then in that of 64."""
    controller, seen = make_controller(2, prompt=6), []
    for _ in range(4):
        controller.fit()
        burst = controller.burst(at(0))
        seen.append((controller.table.max_context, burst.shape.length, burst.max_steps))
        collect(controller, burst, burst.max_steps)
    # At 21 tokens there is room for two tests and a part of a third.
    assert seen == [(5, 32, 16), (21, 32, 8), (29, 64, 16), (45, 64, 16)]


def test_before_a_burst_there_is_room_for_half_of_it():
    """Two in each group: 8 steps are enough, or the younger one makes room."""
    shapes = replace(SHAPES, pages={DP2: 1 + 16})
    controller = make_controller(4, shapes)
    tables = controller.scheduler.tables
    assert tables.count.tolist() == [2] * 4, "for the first test"
    # 24 + 8 tokens are eight pages each, all that there are; 28 + 8 are nine.
    for context, pages in ((16, [5, 5, 5, 5]), (24, [7, 7, 7, 7]), (28, [8, 8, 0, 0])):
        controller.fit()
        collect(controller, controller.burst(at(0)), context - controller.table.max_context)
        assert controller.num_preempted == 0 and controller.table.max_context == context
        controller.admit()
        assert tables.count.tolist() == pages
    assert controller.num_preempted == 2 and controller.table.waiting.tolist() == [2, 3]
    controller.check_integrity()


class TestBehind:
    def running(self, count: int = 16) -> tuple[Controller, Burst]:
        controller = make_controller(count)
        controller.fit()
        return controller, controller.burst(at(0))

    def test_it_ends_where_the_one_before_it_does_or_at_a_newer_threshold(self):
        controller = make_controller(16)
        controller.fit()
        running = controller.burst(at(5))
        assert running.threshold == 5
        for planned, threshold in ((0, 5), (6, 6)):
            burst = controller.burst_behind(running, at(planned))
            assert burst is not None and burst.is_ahead and not running.is_ahead
            assert (burst.threshold, burst.shape) == (threshold, running.shape)

    def test_pages_are_laid_out_behind_those_of_the_one_before_it(self):
        controller, running = self.running(2)
        burst = controller.burst_behind(running, at(0))
        assert burst is not None
        first, filled = running.reserved.pages, running.reserved.filled
        assert (burst.reserved.filled > filled).all()
        for group in range(2):
            np.testing.assert_array_equal(
                burst.reserved.pages[group, : filled[group]], first[group, : filled[group]]
            )

    def test_not_before_rows_that_have_changed(self):
        controller, running = self.running()
        end(controller, kept=7)
        assert controller.table.rows_per_group == 8, "though the bucket is the same"
        assert controller.burst_behind(running, at(0)) is None

    def test_not_for_rows_to_be_compacted(self):
        controller, running = self.running()
        table = controller.table
        ended = np.isin(table.live, [i for g in range(2) for i in table.live[g::2][4:]])
        table.advance(np.ones(16, int), ~ended, 4)
        assert table.fullest == 4
        assert controller.burst_behind(running, at(0)) is None

    def test_not_where_budgets_say_that_it_takes_no_step(self):
        controller, running = self.running()
        controller.table.end[:] = controller.table.length + running.max_steps
        assert controller.burst_behind(running, at(0)) is None

    def test_not_where_somebody_waits(self):
        controller, running = self.running(18)
        assert len(controller.table.waiting) == 2
        assert controller.burst_behind(running, at(0)) is None

    def test_not_where_pages_are_too_few(self):
        """16 and 16 steps, in a pool that has pages for 28 tokens."""
        controller = make_controller(2, replace(SHAPES, pages={DP2: 1 + 16}))
        tables = controller.scheduler.tables
        for pool in tables.pools:
            pool.take(16 - 2 - 5)
        controller.fit()
        running = controller.burst(at(0))
        free = tables.free.copy()
        assert controller.burst_behind(running, at(0)) is None
        assert tables.free.tolist() == free.tolist(), "nothing is laid out"


def test_it_is_checked_only_while_no_burst_is_on_its_way():
    controller = make_controller(4)
    controller.fit()
    burst = controller.burst(at(0))
    controller.check_integrity()
    with pytest.raises(AssertionError, match="other holders"):
        controller.scheduler.check_integrity()
    collect(controller, burst, 4)
    controller.scheduler.check_integrity()
    controller.scheduler.tables.pools[0].take(1)
    with pytest.raises(AssertionError, match="other holders"):
        controller.check_integrity()


@pytest.mark.parametrize(
    "is_on, texts, samples, first",
    [
        (True, 4, 6, [0, 6, 12]),
        (False, 4, 6, [0, 1, 2]),
        (True, 0, 6, [0, 1, 2]),
        (True, 4, 1, [0, 1, 2]),
    ],
)
def test_samples_of_a_prompt_begin_in_turn_where_others_are_drafted_from(
    is_on, texts, samples, first
):
    """Five prompts, before any has begun; rows for eight in each of two groups."""
    table = SequenceTable(
        np.full(5 * samples, PROMPT),
        np.full(5 * samples, CAP),
        prompt_id=np.repeat(np.arange(5), samples),
        num_groups=2,
        rows_per_group=8,
    )
    shapes = replace(SHAPES, drafts=Drafts((1,), 1, 64, texts, stagger=is_on))
    controller = Controller(Contents(table), shapes, DP2, runs_ahead=True)
    assert controller.scheduler.queue[:3].tolist() == first
    controller.admit()
    controller.check_integrity()
