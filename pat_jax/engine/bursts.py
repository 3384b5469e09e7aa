"""Decode bursts of one rollout: dispatched, one behind another, and collected.

While a burst is on its way the next one can be dispatched behind it, so that the devices go on while
the host keeps the accounts: it works with the rows and pages that the first leaves behind. Rows draw
pages from a reserve that the host has laid out.

Follows the host's accounts with device arrays. Decides nothing: `rollout.py` says when.
"""

import jax
import numpy as np

from pat_jax.engine.device.device_pool import DevicePool
from pat_jax.engine.device.migration import must_wait
from pat_jax.engine.device.program_specs import ProgramSpecs
from pat_jax.engine.device.programs import Key, ProgramTable
from pat_jax.engine.scheduler import Scheduler
from pat_jax.engine.sequences.page_reserve import PageReserve
from pat_jax.engine.sequences.sequence_table import SequenceTable
from pat_jax.engine.sequences.state import Burst, DecodeState, RowState, Shape, Until, seen_shape
from pat_jax.models.policy import Params
from pat_jax.planning.held import most_held
from pat_jax.planning.types import Split


class Bursts:
    def __init__(
        self,
        specs: ProgramSpecs,
        programs: ProgramTable,
        table: SequenceTable,
        scheduler: Scheduler,
        pool: DevicePool,
    ):
        self.specs, self.programs = specs, programs
        self.table, self.scheduler, self.pool = table, scheduler, pool
        # Sums over the beginnings and ends of bursts, of what their sequences hold.
        self.kv_slots, self.kv_unused = 0, 0  # tokens
        self.num_running = 0  # dispatched and not collected
        self._rows: RowState | None = None  # None: the host's copy is newer
        self._seen: jax.Array | None = None  # as old as the rows
        # Of the bursts on their way: the rows' pages, the number drawn, what to draw from.
        self._tables: tuple[jax.Array, jax.Array] | None = None
        self._reserve: PageReserve | None = None

    @property
    def _split(self) -> Split:
        return self.pool.layout.split

    @property
    def laid_out(self) -> np.ndarray | int:
        """Pages of each group that are free again when the bursts on their way are collected."""
        return self._reserve.left if self._reserve is not None and self.num_running else 0

    def rows_changed(self) -> None:
        """What the devices have of the rows is out of date."""
        self._rows = None

    def launch(self, params: Params, threshold: int) -> Burst:
        """Dispatches a burst of the live sequences; `Flight.fit` comes before.

        It ends when the planner's `threshold` is reached, where rows can be compacted, or when there
        are rows for those that wait.
        """
        if self._rows is None or self._seen is None:
            rows = self.table.row_state()
            self._rows = jax.device_put(rows, self.pool.layout.sharding("batch"))
            self._seen = self._put_seen()
        shape, steps = self._next(steps_before=0)
        *_, rows, length = shape
        tables = self.scheduler.block_tables(self.table.occupants, self.specs.width(length))
        none_drawn = np.zeros(self._split.dp, np.int32)
        self._tables = jax.device_put((tables, none_drawn), self.pool.layout.sharding("batch"))
        self._reserve = PageReserve(self.scheduler.pools, self.specs.reserve_size(rows))
        self._reserve.fill(self.scheduler.lacking(steps))
        return self._launch(params, shape, steps, self._stop_at(threshold))

    def _stop_at(self, threshold: int) -> int:
        compact_at = self.specs.buckets.rows_below(self._split, self.table.rows_per_group)
        stop_at = max(compact_at, threshold, self.table.refill_at)
        return min(stop_at, self.table.fullest - 1)

    def launch_next(self, params: Params, running: Burst, threshold: int) -> Burst | None:
        """Dispatches the burst after `running`, whose results are not known yet.

        It ends at the newest `threshold`, and where `running` does: if that has come to an end of the
        kind, it takes no step.

        Returns:
          None, and nothing is dispatched, where rows are to change first, pages are too few, or
          budgets say that `running` will reach the threshold.
        """
        table, rows = self.table, self.table.rows_per_group
        if self._rows is None or len(table.waiting):
            return None
        if self.specs.buckets.rows_for(self._split, table.fullest) != rows:
            return None
        live = table.live
        goes_on = live[table.end[live] - table.length[live] > running.max_steps]
        fullest = int(np.bincount(table.group(goes_on), minlength=1).max())
        threshold = max(running.threshold, self._stop_at(threshold))
        if fullest <= threshold:
            return None
        shape, steps = self._next(running.max_steps)
        needed = self.scheduler.lacking(running.max_steps + steps)
        assert self._reserve is not None, "launched"
        if shape != running.shape or not self._reserve.can_hold(needed):
            return None
        self._reserve.fill(needed)
        if must_wait(self.pool.layout):
            jax.block_until_ready(running.output)
        return self._launch(params, shape, steps, threshold)

    def _next(self, steps_before: int) -> tuple[Shape, int]:
        """Shape and most steps of a burst, behind one of up to `steps_before` steps."""
        table, buckets = self.table, self.specs.buckets
        check_every = self.specs.functions.check_every
        context = table.max_context + steps_before
        last_context = int(table.end[table.live].max()) - 1  # with all budgets used up
        length = buckets.length_for(min(last_context, context + check_every))
        steps = self.specs.functions.burst_steps
        if length < last_context:
            steps = min(steps, length - context) // check_every * check_every
        return (self._split, self.table.rows_per_group, length), steps

    def _launch(self, params: Params, shape: Shape, steps: int, threshold: int) -> Burst:
        assert self._rows is not None and self._seen is not None
        assert self._tables is not None and self._reserve is not None
        self._count_pages()
        state = DecodeState(self._rows, self._seen, self.pool.pages, *self._tables)
        until = Until(np.int32(steps), np.int32(threshold))
        reserved = self._reserve.laid_out()
        state, output = self.programs[Key("decode", *shape)](params, state, reserved, until)
        self._rows, self._seen, self.pool.pages = state.rows, state.seen, state.pool
        self._tables = state.tables, state.drawn
        self.num_running += 1
        return Burst(shape, steps, threshold, self.num_running > 1, output)

    def collect(self, burst: Burst) -> tuple[int, int, float]:
        """Waits for a burst; returns the decode steps run, the tokens sampled, and `Ran.held`."""
        output, table = jax.device_get(burst.output), self.table
        live = table.live
        member_of = np.asarray(table.group(live))
        before = table.length[live].copy()
        assert self._reserve is not None, "launched"
        self._reserve.note_drawn(self.scheduler.add(output.pages))
        spoilt = self.table.failed_unheard(output)
        tokens = self.table.retire(output)
        self.pool.copy(self.scheduler.release_ended())
        self._count_pages()
        self.num_running -= 1
        if not self.num_running:
            self._reserve.take_back()
            for group in spoilt:
                self.pool.copy(self.scheduler.wipe(group))
        steps, sampled = int(output.steps), table.length[live] - before
        check_every = self.specs.functions.check_every
        held = most_held(before - 1, sampled, member_of, steps, check_every)
        return steps, tokens, float(held.mean()) if steps else 0.0

    def _count_pages(self) -> None:
        assert self._reserve is not None, "launched"
        pages = self.scheduler.pages_held - int(self._reserve.left.sum())
        self.kv_slots += pages * self.scheduler.page_size
        self.kv_unused += self.scheduler.unused

    def _put_seen(self) -> jax.Array:
        """What penalties look at. Where no live row has one any content will do: nothing is sent."""
        table, sharding = self.table, self.pool.layout.sharding("batch")
        rows = table.num_groups * table.rows_per_group
        shape, old = seen_shape(self.specs.functions.policy.config, rows), self._seen
        if (
            old is not None
            and not table.has_penalties
            and (old.shape, old.sharding) == (shape, sharding)
        ):
            return old
        return jax.device_put(table.seen(shape), sharding)
