"""One rollout in flight: the pool of pages, the rows, and the moves between layouts.

Follows the host's accounts with device arrays. Decides nothing: `rollout.py` says when.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from pat_jax.engine.accounts import NO_ROW
from pat_jax.engine.admission import Admission, Round
from pat_jax.engine.catalogue import COPIES, Catalogue
from pat_jax.engine.due import Copies, PrefillCall, Spans, prefill_calls
from pat_jax.engine.layout import Layout
from pat_jax.engine.migration import Migration, Shifting, Traffic
from pat_jax.engine.paging import NULL_PAGE
from pat_jax.engine.programs import Key, ProgramTable
from pat_jax.engine.rounds import Moves
from pat_jax.engine.scheduler import Request, Scheduler
from pat_jax.engine.state import DecodeState, Pool, RowState, Until, seen_shape
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
        self.catalogue, self.programs, self.layout = catalogue, programs, layout
        split, buckets = layout.split, catalogue.buckets
        rows = buckets.rows[split][-1]
        self.scheduler = Scheduler(requests, num_groups=split.dp, rows_per_group=rows)
        self.admission = Admission(
            self.scheduler,
            num_pages=catalogue.pages[split],
            page_size=catalogue.page_size,
            expected=expected,
        )
        self.length = buckets.lengths[0]
        self.pool: Pool = programs[Key("allocate", split)]()
        self.num_preempted = 0
        self._rows: RowState | None = None  # None: the host's copy is newer
        self._seen: jax.Array | None = None  # as old as the rows

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

    def admit(self, params: Params) -> int:
        """Pages for the next burst, and waiting sequences into free rows; returns tokens prefilled."""
        self._grow()
        if not len(self.scheduler.waiting):
            return 0
        most_rows = self.catalogue.buckets.rows[self.split][-1]
        due = self.admission.admit(most_rows, self._burst_steps)
        self._rows = None
        return self.compute(params, due)

    def _grow(self) -> None:
        if count := self.admission.grow(self._burst_steps):
            self.num_preempted += count
            self._rows = None

    def fit(self) -> None:
        """The smallest buckets that hold the live sequences and a few more steps of them."""
        self._grow()
        scheduler, buckets = self.scheduler, self.catalogue.buckets
        rows = buckets.rows_for(self.split, scheduler.fullest)
        if rows != self.num_rows:
            scheduler.compact(rows)
            self._rows = None
        ahead = scheduler.max_context + self.catalogue.functions.check_every
        self.length = buckets.length_for(min(self._last_context, ahead))

    def steps_possible(self) -> int:
        """Decode steps before a live sequence would outgrow the length bucket."""
        if self._last_context <= self.length:
            return self._burst_steps
        return self.length - self.scheduler.max_context

    @property
    def _last_context(self) -> int:
        """Tokens in the cache of the longest live sequence when it has used up its budget."""
        return int(self.scheduler.end[self.scheduler.live].max()) - 1

    def decode(self, params: Params, *, max_steps: int, threshold: int) -> tuple[int, int]:
        """One burst on the devices; returns the decode steps run and the tokens sampled."""
        if self._rows is None or self._seen is None:
            self._rows = self._put_rows(self.scheduler.row_state())
            self._seen = self._put_seen()
        until = Until(np.int32(max_steps), np.int32(threshold))
        program = self.programs[Key("decode", self.split, self.num_rows, self.length)]
        width = self.catalogue.width(self.length)
        tables = self.admission.table(self.scheduler.occupants, width)
        state = DecodeState(self._rows, self._seen, self.pool)
        state, output = program(params, state, tables, until)
        self._rows, self._seen, self.pool = state.rows, state.seen, state.pool
        output, still_live = jax.device_get((output, state.rows.live))
        tokens = self.scheduler.retire(output, still_live)
        self._copy(self.admission.release_ended())
        return int(output.steps), tokens

    def end(self, has_enough: Callable[[int, np.ndarray], bool]) -> None:
        """Ends the live sequences of which `has_enough`, given what they have said, says so."""
        scheduler = self.scheduler
        ended = [i for i in scheduler.live if has_enough(int(i), scheduler.response(i))]
        if ended:
            scheduler.end_now(np.array(ended))
            self._copy(self.admission.release_ended())
            self._rows = None

    def carry(self, target: Layout, recompute_below: int) -> Carried:
        """Moves the live sequences to `target`; only dispatched, `settle` waits for it.

        Those with fewer than `recompute_below` tokens in the cache leave them behind: `compute` must
        follow, when the weights are there. The others migrate.
        """
        scheduler, source = self.scheduler, self.layout
        live, split = scheduler.live, target.split
        is_recomputed = scheduler.length[live] - 1 < recompute_below
        copies, moves, due = self.admission.carry(
            split.dp,
            num_pages=self.catalogue.pages[split],
            is_recomputed=is_recomputed,
            steps=self._burst_steps,
        )
        self._copy(copies)
        self.layout, self._rows = target, None
        self.pool = self.programs[Key("view", source.split, target=split)](self.pool)
        migration = Migration(self.programs, source, target)
        order = (0, 1, 3) if migration.exchange.is_up else (2, 3, 1)
        self.pool, traffic = migration.run(self.pool, Moves(*(moves[k] for k in order)))
        # Who found no pages is recomputed as well, now or when there are some.
        has_no_row = scheduler.row[live] == NO_ROW
        anew = is_recomputed | has_no_row | np.isin(live, due.spans.sequence)
        return Carried(int(anew.sum()), due, traffic)

    def balance_options(self) -> list[np.ndarray]:
        """Groups in which the live sequences could be; see `balance.options`."""
        return self.admission.balance_options(self.catalogue.buckets.rows[self.split])

    def balance(self, plan: Balance) -> Balanced:
        """Moves live sequences to the groups that `plan` gives them, and waits for their pages."""
        start, scheduler = time.perf_counter(), self.scheduler
        live, fullest = scheduler.live, scheduler.fullest
        group = scheduler.group(live)
        moves = self.admission.balance(plan.group)
        self._rows = None
        self.pool, traffic = Shifting(self.programs, self.layout).run(self.pool, moves)
        self.settle()
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

    def settle(self) -> None:
        """Waits until the pool is there."""
        jax.block_until_ready(self.pool)

    def compute(self, params: Params, due: Round) -> int:
        """Pages of known tokens; returns how many tokens were processed.

        The newest token of a sequence is left to the first decode step, so no logits are needed.
        """
        for call in self._calls(due.spans):
            self._prefill(params, call)
        self._copy(due.copies)
        self.settle()
        return int((due.spans.stop - due.spans.start).sum())

    def _calls(self, spans: Spans) -> list[PrefillCall]:
        catalogue = self.catalogue
        return prefill_calls(
            spans,
            num_groups=self.split.dp,
            blocks=catalogue.prefill_blocks,
            page_size=catalogue.page_size,
        )

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
        program = self.programs[Key("prefill", self.split, catalogue.prefill_blocks, length)]
        self.pool = program(params, self.pool, tokens, start, tables)

    def _copy(self, copies: Copies) -> None:
        program = self.programs[Key("copy_pages", self.split)]
        queues = [np.flatnonzero(copies.group == g) for g in range(self.split.dp)]
        for begin in range(0, max(map(len, queues)), COPIES):
            pairs = np.full((2, self.split.dp, COPIES), NULL_PAGE, np.int32)
            for g, queue in enumerate(queues):
                now = queue[begin : begin + COPIES]
                pairs[:, g, : len(now)] = copies.source[now], copies.target[now]
            self.pool = program(self.pool, *pairs.reshape(2, -1))

    def _put_rows(self, rows: RowState) -> RowState:
        return jax.device_put(rows, self.layout.sharding("batch"))

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
        _delete(self.pool)


def _delete(pool: Pool) -> None:
    for leaf in jax.tree.leaves(pool):
        leaf.delete()
