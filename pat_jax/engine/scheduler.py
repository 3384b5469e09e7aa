"""The scheduler: decides what a rollout does next, from host state alone. An executor does it.

Executors are devices (`device_executor.py`) and a simulated clock. Each rule of a rollout is in one
place only: here, in the cache manager, or in the planner.
"""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from pat_jax.engine.burst_shapes import BurstShapes
from pat_jax.engine.cache_manager import CacheManager
from pat_jax.engine.executor import Burst, Collected, Relocation
from pat_jax.engine.sequences.block_tables import pages_with
from pat_jax.engine.sequences.contents import Contents, RowsOutput
from pat_jax.engine.sequences.page_reserve import PageReserve
from pat_jax.engine.sequences.prefill_calls import Copies, PrefillWork
from pat_jax.layout.buckets import Shape, Shapes
from pat_jax.planning.draft_counts import DraftResult
from pat_jax.planning.held import most_held
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.types import Plan, Split

if TYPE_CHECKING:
    from pat_jax.engine.by_need import ByNeed  # knows programs: simulated rollouts have none

REFILL_PART = 8


class Scheduler:
    """Schedules one rollout, and keeps account of its rows and pages in the current layout."""

    def __init__(
        self,
        contents: Contents,
        shapes: Shapes,
        split: Split,
        *,
        runs_ahead: bool,
        checks: bool = False,
        expected: np.ndarray | None = None,
        by_need: "ByNeed | None" = None,
    ):
        """
        Args:
          contents: of sequences that all wait; their table has the replicas of `split`.
          runs_ahead: dispatch a burst before the results of the one before it are known.
          checks: call `check_integrity` after each burst.
          expected: float[sequences], predicted response lengths in tokens; see CacheManager.
          by_need: chooses among the programs compiled so far; None if all programs are compiled.
        """
        self.contents = contents
        self.table = contents.table
        self.shapes = shapes
        self.bursts = BurstShapes(shapes, self.table, by_need)
        self.split = split
        self.runs_ahead = runs_ahead
        self.checks = checks
        self.cache_manager = CacheManager(
            contents, num_pages=shapes.pages[split], page_size=shapes.page_size, expected=expected
        )
        self.num_preempted = 0
        # Tokens that fit in the sequences' pages, and how many of these are not used: sums over the
        # starts and ends of bursts.
        self.kv_slots = 0
        self.kv_unused = 0
        self._in_flight: deque[Shape] = deque()  # shapes of the bursts dispatched, not collected
        self._reserve: PageReserve | None = None
        self._version = -1  # the table's version when the running bursts began

    def admit(self) -> PrefillWork:
        """Gives rows and pages for a few steps to waiting sequences; returns their prefill."""
        self._grow()
        shapes = self.shapes
        most_rows = shapes.buckets.rows[self.split][-1]
        return self.cache_manager.admit(most_rows, shapes.burst_steps, at_once=shapes.check_every)

    def _grow(self) -> None:
        """Makes room for half a burst.

        With less room, bursts end because pages run out, which costs round-trips to the host. With
        more, fewer sequences run.
        """
        at_once = self.shapes.check_every
        room = max(at_once, self.shapes.burst_steps // 2)
        self.num_preempted += self.cache_manager.grow(room, at_once=at_once)

    def decide(self, planner: Planner) -> Plan:
        """Returns the plan: the next burst's layout, and moves to other replicas of the layout."""
        # Pages reserved for running bursts are free again before any sequence moves.
        laid_out = self._reserve.left if self._reserve is not None and self._in_flight else 0
        row_buckets = self.shapes.buckets.rows[self.split]
        options = self.cache_manager.balance_options(row_buckets, laid_out)
        return planner.decide(self.table.load(), self.split, options)

    def leave(self, plan: Plan) -> Relocation:
        """Does the first half of a plan's move; `arrive` must follow.

        In a switch, sequences with fewer tokens than `plan.recompute_below`, or with too few free
        pages, leave their pages behind. In a move within the layout, a sequence that finds too few
        pages in its new replica stays.
        """
        table = self.table
        source = self.split
        target = plan.split
        load = table.load()
        if plan.replica is not None:
            replica, moves = self.cache_manager.balance(plan.replica)
            return Relocation(source, source, load, replica, np.zeros(load.running, bool), moves)
        is_recomputed = load.context < plan.recompute_below
        replica = table.regroup(target.dp, is_recomputed)
        moves, is_left = self.cache_manager.leave(
            replica,
            num_replicas=target.dp,
            num_pages=self.shapes.pages[target],
            is_recomputed=is_recomputed,
        )
        self.split = target
        return Relocation(source, target, load, replica, is_left, moves)

    def arrive(
        self, relocation: Relocation, new_page: np.ndarray | None
    ) -> tuple[PrefillWork, np.ndarray]:
        """Does the second half of a move: schedules the recomputation of what was left behind.

        Args:
          new_page: int[moves], the page where each move arrived, NULL_PAGE if it found no room;
            None if all arrived where `leave` planned.

        Returns:
          The prefill to run, and which sequences find no pages and wait, bool[running].
        """
        is_left = relocation.is_left
        if new_page is not None:
            is_left = is_left | self.cache_manager.settle(relocation.moves, new_page)
        return self.cache_manager.arrive(relocation.replica, is_left, self.shapes.check_every)

    def fit(self) -> None:
        """Gives pages for the next few steps; compacts rows to the smallest bucket that fits."""
        self._grow()
        rows = self.bursts.fewest_rows(self.split)
        if rows != self.table.rows_per_replica:
            self.table.compact(rows)

    def burst(self, plan: Plan) -> Burst:
        """Returns the next burst of the running sequences; call `fit` before.

        The burst ends when the plan's threshold is reached, when rows can be compacted, or when
        enough rows are free for waiting sequences. It uses the plan's number of draft tokens if
        rows and pages allow it.
        """
        num_draft_tokens = self._num_draft_tokens(plan)
        pace = self.shapes.pace(num_draft_tokens)
        shape, steps = self.bursts.next(self.split, num_draft_tokens)
        tables = self.cache_manager.tables
        size = self.shapes.reserve_size(self.table.rows_per_replica, num_draft_tokens)
        self._reserve = PageReserve(tables.pools, size)
        self._version = self.table.version
        self._reserve.fill(tables.lacking(steps * pace.step_tokens))
        stop_at = self._stop_at(plan.threshold)
        return self._launched(shape, steps, stop_at, plan, is_ahead=False)

    def _num_draft_tokens(self, plan: Plan) -> int:
        """The plan's number of draft tokens if a program and enough pages exist, else 0.

        Each row needs pages for what it may generate up to the next test, and pages of a draft
        model's cache."""
        self.bursts.lacked = None
        shapes = self.shapes
        table = self.table
        tables = self.cache_manager.tables
        if plan.num_draft_tokens not in shapes.drafts.of(table.rows_per_replica):
            return 0
        if shapes.drafts.has_model:
            asked = pages_with(table, shapes.asked_ahead, shapes.page_size)
            most = shapes.buckets.draft_pages(self.split, shapes.drafts, shapes.page_size)
            if (np.bincount(table.replica(table.running), asked) >= most).any():
                return 0
        lacking = tables.lacking(shapes.pace(plan.num_draft_tokens).check_tokens)
        if (lacking > tables.free).any():
            return 0
        return plan.num_draft_tokens if self.bursts.has_drafts(self.split, plan) else 0

    def burst_behind(self, in_flight: Burst, plan: Plan) -> Burst | None:
        """Returns the burst to dispatch behind `in_flight`, whose results are not known yet.

        It ends at the larger of the newest plan's threshold and that of `in_flight`. So it takes no
        step if `in_flight` ended at its threshold.

        Returns:
          None if rows or the number of draft tokens must change first, or if pages are too few.
          None, too, if the limits of the requests show that `in_flight` will reach the threshold.
        """
        table = self.table
        reserve = self._reserve
        assert reserve is not None, "launched"
        num_draft_tokens = in_flight.shape.num_draft_tokens
        if table.version != self._version or len(table.waiting):
            return None
        if self._num_draft_tokens(plan) != num_draft_tokens:
            return None
        running = table.running
        goes_on = running[table.end[running] - table.length[running] > in_flight.max_steps]
        fullest = int(np.bincount(table.replica(goes_on), minlength=1).max())
        threshold = max(in_flight.threshold, self._stop_at(plan.threshold))
        if fullest <= threshold:
            return None
        pace = self.shapes.pace(num_draft_tokens)
        before = in_flight.max_steps * pace.step_tokens
        shape, steps = self.bursts.next(self.split, num_draft_tokens, before)
        needed = self.cache_manager.tables.lacking(before + steps * pace.step_tokens)
        if shape != in_flight.shape or not reserve.can_hold(needed):
            return None
        reserve.fill(needed)
        return self._launched(shape, steps, threshold, plan, is_ahead=True)

    def _stop_at(self, threshold: int) -> int:
        fullest = self.table.fullest
        in_flight = self._in_flight[-1] if self._in_flight else None
        compact_at = self.bursts.rows_below(self.split, in_flight)
        # If sequences wait, a burst ends when an eighth of the fullest replica has ended. On real
        # lengths that takes fewer decode steps than bursts of 64 steps, and no more even if each
        # burst costs another two.
        refill_at = fullest - -(-fullest // REFILL_PART) if len(self.table.waiting) else 0
        return min(max(compact_at, threshold, refill_at), fullest - 1)

    def _launched(
        self, shape: Shape, steps: int, threshold: int, plan: Plan, *, is_ahead: bool
    ) -> Burst:
        assert self._reserve is not None
        self._count_pages()
        self._in_flight.append(shape)
        predicted = plan.predicted if shape.num_draft_tokens else None
        laid_out = self._reserve.laid_out()
        return Burst(shape, steps, threshold, is_ahead, plan.accept_prob, predicted, laid_out)

    def collect(self, output: RowsOutput) -> Collected:
        """Takes over the results of the oldest running burst."""
        table = self.table
        tables = self.cache_manager.tables
        reserve = self._reserve
        assert reserve is not None, "launched"
        running = table.running
        pace = self.shapes.pace(self._in_flight.popleft().num_draft_tokens)
        replica = table.replica(running)
        row = table.row[running]
        context = table.length[running] - 1
        emitted = output.emitted[row]
        goes_on = output.running[row]
        steps = int(output.steps)
        running_steps = output.running_steps[row]
        reserve.note_drawn(tables.add(output.pages))
        replicas = self.contents.poisoned_replicas(output)
        self.contents.take(output)
        table.advance(emitted, goes_on, steps, running_steps)
        poisoned = self.cache_manager.release_ended()
        self._count_pages()
        if not self._in_flight:
            reserve.take_back()
            parts = zip(poisoned, *map(self.cache_manager.scrub, replicas), strict=True)
            poisoned = Copies(*map(np.concatenate, parts))
        # Tokens that drafts add count half: their average over the burst.
        held = most_held(
            context + (emitted - running_steps) / 2, running_steps, replica, steps, pace.check_every
        )
        mean_held = float(held.mean()) if steps else 0.0
        if self.checks:
            self.check_integrity()
        drafted = DraftResult(*(np.sum(x, axis=0) for x in output.drafted))
        ended = running[~goes_on]
        return Collected(
            steps, int(emitted.sum()), int(running_steps.sum()), drafted, mean_held, ended, poisoned
        )

    def end(self, should_stop: Callable[[int], bool]) -> tuple[np.ndarray, Copies]:
        """Ends sequences that have generated enough; returns them and the pages to overwrite."""
        ended = np.array([i for i in self.table.running.tolist() if should_stop(i)], np.int64)
        if len(ended):
            self.table.end_now(ended)
        return ended, self.cache_manager.release_ended()

    def _count_pages(self) -> None:
        assert self._reserve is not None, "launched"
        tables = self.cache_manager.tables
        self.kv_slots += (tables.num_held - int(self._reserve.left.sum())) * tables.page_size
        self.kv_unused += tables.unused

    def check_integrity(self) -> None:
        """Raises AssertionError if rows, pages and queue disagree. Skipped while a burst runs."""
        if not self._in_flight:
            self.cache_manager.check_integrity()
