"""One rollout in flight: the pool of pages, the rows, and the moves between layouts.

A burst is dispatched by `launch` and its results are taken in by `collect`. In between the next one
can be dispatched behind it, so that the devices go on while the host keeps the accounts: it works
with the rows and pages that the first leaves behind. Rows draw pages from a stock that the host has
laid out.

Follows the host's accounts with device arrays. Decides nothing: `rollout.py` says when.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from pat_jax.engine.accounts import NO_ROW
from pat_jax.engine.admission import Admission, Round, steps_with_room
from pat_jax.engine.catalogue import Catalogue
from pat_jax.engine.device_pool import DevicePool
from pat_jax.engine.due import PrefillCall, prefill_calls
from pat_jax.engine.layout import Layout
from pat_jax.engine.migration import Traffic, must_wait
from pat_jax.engine.programs import Key, ProgramTable
from pat_jax.engine.scheduler import Request, Scheduler
from pat_jax.engine.state import Burst, DecodeState, RowState, Shape, Until, seen_shape
from pat_jax.engine.stock import Stocks
from pat_jax.engine.trace import Balanced
from pat_jax.models.policy import Params
from pat_jax.planning.types import Balance, Split

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Carried:
    """How the sequences went to another layout."""

    num_recomputed: int
    due: Round  # what is still to be computed there
    traffic: Traffic


class Flight:
    """Sequences being generated under one policy, in one layout at a time."""

    def __init__(
        self,
        catalogue: Catalogue,
        programs: ProgramTable,
        layout: Layout,
        requests: Sequence[Request],
        expected: np.ndarray | None = None,
    ):
        """
        Args:
          expected: float[requests], tokens of the responses; see Admission.
        """
        self.catalogue, self.programs = catalogue, programs
        split, buckets = layout.split, catalogue.buckets
        rows = buckets.rows[split][-1]
        self.scheduler = Scheduler(requests, num_groups=split.dp, rows_per_group=rows)
        self.admission = Admission(
            self.scheduler,
            num_pages=catalogue.pages[split],
            page_size=catalogue.page_size,
            expected=expected,
        )
        self.pool = DevicePool(catalogue, programs, layout)
        self.num_preempted = self.prefill_tokens = 0
        self.prefill_slots = 0  # tokens that the calls had room for
        # Sums over the beginnings and ends of bursts, of what their sequences hold.
        self.kv_slots, self.kv_unused = 0, 0  # tokens
        self._rows: RowState | None = None  # None: the host's copy is newer
        self._seen: jax.Array | None = None  # as old as the rows
        # Of the bursts that are on their way: the rows' pages, the number drawn, what to draw from.
        self._tables: tuple[jax.Array, jax.Array] | None = None
        self._stocks: Stocks | None = None
        self._num_running = 0

    @property
    def layout(self) -> Layout:
        return self.pool.layout

    @property
    def split(self) -> Split:
        return self.layout.split

    @property
    def num_rows(self) -> int:
        """The row bucket: rows of one data-parallel group."""
        return self.scheduler.rows_per_group

    @property
    def _burst_steps(self) -> int:
        return self.catalogue.functions.burst_steps

    @property
    def _check_every(self) -> int:
        return self.catalogue.functions.check_every

    def admit(self, params: Params) -> None:
        """Pages for the next few steps, and waiting sequences into free rows, prefilled."""
        self._grow()
        if len(self.scheduler.waiting):
            most_rows = self.catalogue.buckets.rows[self.split][-1]
            steps, at_once = self._burst_steps, self._check_every
            due = self.admission.admit(most_rows, steps, at_once=at_once)
            self._rows = None
            self.compute(params, due)

    def _grow(self) -> None:
        room = steps_with_room(self._burst_steps, self._check_every)
        if count := self.admission.grow(room, at_once=self._check_every):
            self.num_preempted += count
            self._rows = None

    def fit(self) -> None:
        """Pages for the next few steps, and the smallest row bucket that holds the live sequences."""
        self._grow()
        scheduler, buckets = self.scheduler, self.catalogue.buckets
        rows = buckets.rows_for(self.split, scheduler.fullest)
        if rows != self.num_rows:
            scheduler.compact(rows)
            self._rows = None

    def launch(self, params: Params, threshold: int) -> Burst:
        """Dispatches a burst of the live sequences; `fit` comes before.

        It ends when the planner's `threshold` is reached, where rows can be compacted, or when there
        are rows for those that wait.
        """
        if self._rows is None or self._seen is None:
            rows = self.scheduler.row_state()
            self._rows = jax.device_put(rows, self.layout.sharding("batch"))
            self._seen = self._put_seen()
        shape, steps = self._next(steps_before=0)
        *_, rows, length = shape
        tables = self.admission.table(self.scheduler.occupants, self.catalogue.width(length))
        none_drawn = np.zeros(self.split.dp, np.int32)
        self._tables = jax.device_put((tables, none_drawn), self.layout.sharding("batch"))
        self._stocks = Stocks(self.admission.pools, self.catalogue.stock_size(rows))
        self._stocks.fill(self.admission.lacking(steps))
        return self._launch(params, shape, steps, self._stop_at(threshold))

    def _stop_at(self, threshold: int) -> int:
        compact_at = self.catalogue.buckets.rows_below(self.split, self.num_rows)
        stop_at = max(compact_at, threshold, self.scheduler.refill_at)
        return min(stop_at, self.scheduler.fullest - 1)

    def launch_next(self, params: Params, running: Burst, threshold: int) -> Burst | None:
        """Dispatches the burst after `running`, whose results are not known yet.

        It ends at the newest `threshold`, and where `running` does: if that has come to an end of the
        kind, it takes no step.

        Returns:
          None, and nothing is dispatched, where rows are to change first, pages are too few, or
          budgets say that `running` will reach the threshold.
        """
        scheduler, rows = self.scheduler, self.num_rows
        if self._rows is None or len(scheduler.waiting):
            return None
        if self.catalogue.buckets.rows_for(self.split, scheduler.fullest) != rows:
            return None
        live = scheduler.live
        goes_on = live[scheduler.end[live] - scheduler.length[live] > running.max_steps]
        fullest = int(np.bincount(scheduler.group(goes_on), minlength=1).max())
        threshold = max(running.threshold, self._stop_at(threshold))
        if fullest <= threshold:
            return None
        shape, steps = self._next(running.max_steps)
        needed = self.admission.lacking(running.max_steps + steps)
        assert self._stocks is not None, "launched"
        if shape != running.shape or not self._stocks.can_hold(needed):
            return None
        self._stocks.fill(needed)
        if must_wait(self.layout):
            jax.block_until_ready(running.output)
        return self._launch(params, shape, steps, threshold)

    def _next(self, steps_before: int) -> tuple[Shape, int]:
        """Shape and most steps of a burst, behind one of up to `steps_before` steps."""
        scheduler, buckets, check_every = self.scheduler, self.catalogue.buckets, self._check_every
        context = scheduler.max_context + steps_before
        last_context = int(scheduler.end[scheduler.live].max()) - 1  # with all budgets used up
        length = buckets.length_for(min(last_context, context + check_every))
        steps = self._burst_steps
        if length < last_context:
            steps = min(steps, length - context) // check_every * check_every
        return (self.split, self.num_rows, length), steps

    def _launch(self, params: Params, shape: Shape, steps: int, threshold: int) -> Burst:
        assert self._rows is not None and self._seen is not None
        assert self._tables is not None and self._stocks is not None
        self._count_pages()
        state = DecodeState(self._rows, self._seen, self.pool.pages, *self._tables)
        until = Until(np.int32(steps), np.int32(threshold))
        stock = self._stocks.laid_out()
        state, output = self.programs[Key("decode", *shape)](params, state, stock, until)
        self._rows, self._seen, self.pool.pages = state.rows, state.seen, state.pool
        self._tables = state.tables, state.drawn
        self._num_running += 1
        return Burst(shape, steps, threshold, self._num_running > 1, output)

    def collect(self, burst: Burst) -> tuple[int, int]:
        """Waits for a burst; returns the decode steps run and the tokens sampled."""
        output = jax.device_get(burst.output)
        assert self._stocks is not None, "launched"
        self._stocks.note_drawn(self.admission.add(output.pages))
        spoilt = self.scheduler.failed_unheard(output)
        tokens = self.scheduler.retire(output)
        self.pool.copy(self.admission.release_ended())
        self._count_pages()
        self._num_running -= 1
        if not self._num_running:
            self._stocks.take_back()
            for group in spoilt:
                self.pool.copy(self.admission.wipe(group))
        return int(output.steps), tokens

    def _count_pages(self) -> None:
        assert self._stocks is not None, "launched"
        pages = self.admission.pages_held - int(self._stocks.left.sum())
        self.kv_slots += pages * self.admission.page_size
        self.kv_unused += self.admission.unused

    def end(self, has_enough: Callable[[int, np.ndarray], bool]) -> None:
        """Ends the live sequences of which `has_enough`, given what they have said, says so."""
        scheduler = self.scheduler
        ended = [i for i in scheduler.live if has_enough(int(i), scheduler.response(i))]
        if ended:
            scheduler.end_now(np.array(ended))
            self.pool.copy(self.admission.release_ended())
            self._rows = None

    def carry(self, target: Layout, recompute_below: int) -> Carried:
        """Moves the live sequences to `target`; only dispatched, `compute` waits for it.

        Those with fewer than `recompute_below` tokens in the cache leave them behind: `compute` must
        follow, when the weights are there. The others migrate.
        """
        scheduler, live, split = self.scheduler, self.scheduler.live, target.split
        is_recomputed = scheduler.length[live] - 1 < recompute_below
        copies, shipments, due = self.admission.carry(
            split.dp,
            num_pages=self.catalogue.pages[split],
            is_recomputed=is_recomputed,
            steps=self._check_every,
        )
        self.pool.copy(copies)
        self._rows, traffic = None, self.pool.migrate(target, shipments)
        # Who found no pages is recomputed as well, now or when there are some.
        has_no_row = scheduler.row[live] == NO_ROW
        anew = is_recomputed | has_no_row | np.isin(live, due.spans.sequence)
        return Carried(int(anew.sum()), due, traffic)

    def balance_options(self) -> list[np.ndarray]:
        """Groups in which the live sequences could be; see `balance.options`.

        What is laid out for bursts on their way is free again before any of them move.
        """
        laid_out = self._stocks.left if self._stocks is not None else 0
        return self.admission.balance_options(self.catalogue.buckets.rows[self.split], laid_out)

    def balance(self, plan: Balance) -> Balanced:
        """Moves live sequences to the groups that `plan` gives them, and waits for their pages."""
        start, scheduler = time.perf_counter(), self.scheduler
        live, fullest = scheduler.live, scheduler.fullest
        group = scheduler.group(live)
        moves = self.admission.balance(plan.group)
        self._rows, traffic = None, self.pool.shift(moves)
        self.pool.settle()
        seconds = time.perf_counter() - start
        log.info("balance: %s; took %.3f s", plan.reason, seconds)
        return Balanced(
            step=scheduler.num_steps,
            layout=str(self.layout),
            sequences=int((scheduler.group(live) != group).sum()),
            pages=len(moves.old_page),
            fullest=(fullest, scheduler.fullest),
            seconds=seconds,
            predicted_saving_s=plan.predicted_saving_s,
            predicted_cost_s=plan.predicted_cost_s,
            bytes_moved=traffic.num_bytes,
            least_bytes=traffic.least_bytes,
        )

    def compute(self, params: Params, due: Round) -> None:
        """Pages of known tokens.

        The newest token of a sequence is left to the first decode step, so no logits are needed.
        """
        catalogue = self.catalogue
        for call in prefill_calls(
            due.spans,
            num_groups=self.split.dp,
            sizes=catalogue.prefill_sizes,
            page_size=catalogue.page_size,
        ):
            self._prefill(params, call)
            self.prefill_slots += call.length.size * self.catalogue.page_size
        self.prefill_tokens += int((due.spans.stop - due.spans.start).sum())
        self.pool.copy(due.copies)
        self.pool.settle()

    def _prefill(self, params: Params, call: PrefillCall) -> None:
        catalogue, size = self.catalogue, self.catalogue.page_size
        length = catalogue.buckets.length_for(call.context)
        sequence, start = call.sequence.reshape(-1), call.start.reshape(-1)
        tokens = np.zeros((len(sequence), size), np.int32)
        for block, (i, at, count) in enumerate(
            zip(sequence, start, call.length.reshape(-1), strict=True)
        ):
            tokens[block, :count] = self.scheduler.tokens[i, at : at + count]
        tables = self.admission.table(sequence, catalogue.width(length))
        self.pool.prefill(params, tokens, start, tables, length)

    def _put_seen(self) -> jax.Array:
        """What penalties look at. Where no live row has one any content will do: nothing is sent."""
        config, sharding = self.catalogue.functions.policy.config, self.layout.sharding("batch")
        shape, old = seen_shape(config, self.scheduler.num_groups * self.num_rows), self._seen
        is_needed = self.scheduler.has_penalties
        if old is not None and not is_needed and (old.shape, old.sharding) == (shape, sharding):
            return old
        return jax.device_put(self.scheduler.seen(shape), sharding)

    def release(self) -> None:
        """Frees the pool: the update that follows needs the memory."""
        self.pool.delete()
