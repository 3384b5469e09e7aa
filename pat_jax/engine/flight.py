"""One rollout in flight: the pool of pages, the rows, and the moves between layouts.

Follows the scheduler's accounts with device arrays. Decides nothing: `rollout.py` says when.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from pat_jax.engine.catalogue import COPIES, Catalogue
from pat_jax.engine.layout import Layout, shard_bytes
from pat_jax.engine.migration import Migration, Traffic
from pat_jax.engine.paging import (
    NO_SEQUENCE,
    NULL_PAGE,
    Admitted,
    PagePool,
    Spans,
    num_pages_for,
    prefill_calls,
)
from pat_jax.engine.programs import Key, ProgramTable
from pat_jax.engine.rounds import Moves
from pat_jax.engine.scheduler import Request, Scheduler
from pat_jax.engine.state import DecodeState, Pool, RowState, Until
from pat_jax.models.policy import Params
from pat_jax.planning.types import Split


@dataclass(frozen=True)
class Carried:
    """How the sequences went to another layout."""

    recomputed: np.ndarray  # int[sequences], those whose cache is still to be computed
    traffic: Traffic
    extra_bytes: int  # of a device, at most, besides the pool left behind


class Flight:
    """Sequences being generated under one policy, in one layout at a time."""

    def __init__(
        self,
        catalogue: Catalogue,
        programs: ProgramTable,
        layout: Layout,
        requests: Sequence[Request],
    ):
        self.catalogue, self.programs, self.layout = catalogue, programs, layout
        split, buckets = layout.split, catalogue.buckets
        rows = buckets.rows_for(split, -(-len(requests) // split.dp))
        self.scheduler = Scheduler(requests, num_groups=split.dp, rows_per_group=rows)
        self.length = buckets.lengths[0]
        self.pools = self._new_pools()
        self.pages: dict[int, np.ndarray] = {}
        self.pool: Pool = programs[Key("allocate", split)]()
        self._rows: RowState | None = None  # None: the host's copy is newer

    def _new_pools(self) -> list[PagePool]:
        split, catalogue = self.split, self.catalogue
        return [PagePool(catalogue.pages[split], catalogue.page_size) for _ in range(split.dp)]

    @property
    def split(self) -> Split:
        return self.layout.split

    @property
    def num_rows(self) -> int:
        """The row bucket: rows of one data-parallel group."""
        return self.scheduler.rows_per_group

    def decode(self, params: Params, *, max_steps: int, threshold: int) -> tuple[int, int]:
        """One burst on the devices; returns the decode steps run and the tokens sampled."""
        if self._rows is None:
            self._rows = self._put_rows(self.scheduler.row_state())
        until = Until(np.int32(max_steps), np.int32(threshold))
        program = self.programs[Key("decode", self.split, self.num_rows, self.length)]
        tables = self._tables(max_steps)
        state, output = program(params, DecodeState(self._rows, self.pool), tables, until)
        self._rows, self.pool = state.rows, state.pool
        output, still_live = jax.device_get((output, state.rows.live))
        live = self.scheduler.live
        group = self.scheduler.row[live] // self.num_rows
        tokens = self.scheduler.retire(output, still_live)
        for i, g in zip(live, group, strict=True):
            if self.scheduler.is_done[i]:
                self.pools[g].release(self.pages.pop(i))
        return int(output.steps), tokens

    def _tables(self, steps: int) -> np.ndarray:
        scheduler = self.scheduler
        tables = np.full(
            (self.split.dp * self.num_rows, self.catalogue.width(self.length)), NULL_PAGE, np.int32
        )
        for i in scheduler.live:
            need = min(int(scheduler.length[i]) - 1 + steps, int(scheduler.end[i]) - 1)
            pages = self.pools[scheduler.row[i] // self.num_rows].extend(self.pages[i], need)
            assert pages is not None
            self.pages[i] = pages
            tables[scheduler.row[i], : len(pages)] = pages[: tables.shape[1]]
        return tables

    def steps_possible(self) -> int:
        """Decode steps before a live sequence would outgrow the length bucket."""
        live = self.scheduler.live
        if int(self.scheduler.end[live].max()) - 1 <= self.length:
            return self.catalogue.functions.burst_steps
        return self.length - self.scheduler.max_context

    def fit(self) -> None:
        """The smallest buckets that hold the live sequences, and a few steps more of them."""
        scheduler, buckets = self.scheduler, self.catalogue.buckets
        rows = buckets.rows_for(self.split, scheduler.fullest)
        if rows != self.num_rows:
            scheduler.compact(rows)
            self._rows = None
        ahead = scheduler.max_context + self.catalogue.functions.check_every
        last = int(scheduler.end[scheduler.live].max()) - 1
        self.length = buckets.length_for(min(last, ahead))

    def carry(self, target: Layout, recompute_below: int) -> "Carried":
        """Moves the live sequences to `target`; only dispatched, `settle` waits for it.

        Those with fewer than `recompute_below` tokens in the cache leave them behind: `prefill` of
        these must follow, when the weights are there. The others migrate.
        """
        scheduler, source = self.scheduler, self.layout
        live, split = scheduler.live, target.split
        is_recomputed = scheduler.length[live] - 1 < recompute_below
        before = np.divmod(scheduler.row[live], self.num_rows)
        group = scheduler.regroup(split.dp, is_recomputed)
        rows = self.catalogue.buckets.rows_for(split, int(np.bincount(group).max()))
        scheduler.seat(group, num_groups=split.dp, rows_per_group=rows)
        after = np.divmod(scheduler.row[live], rows)
        allocate = self.programs[Key("allocate", split)]
        self.layout, self._rows = target, None
        before_pages, self.pages, self.pools = self.pages, {}, self._new_pools()
        if is_recomputed.all():
            _delete(self.pool)
            self.pool = allocate()
            return Carried(live, Traffic(), self._pool_bytes)
        migration = Migration(self.programs, source, target)
        narrow, wide = (before, after) if migration.exchange.is_up else (after, before)
        moved = [[], [], []]
        for n, i in enumerate(live):
            if is_recomputed[n]:
                continue
            held = int(scheduler.length[i]) - 1
            old = before_pages[i]
            new = self.pools[after[0][n]].extend(np.zeros(0, np.int32), held)
            assert new is not None
            self.pages[i] = new
            old = old[: len(new)]
            at = (old, new) if migration.exchange.is_up else (new, old)
            moved[0].append(np.full(len(new), narrow[0][n]))
            moved[1].append(at[0])
            moved[2].append(at[1])
        moves = Moves(*(np.concatenate(x) for x in moved))
        old = self.pool
        self.pool, traffic = migration.run(old, allocate(), moves)
        _delete(old)  # the devices free it when they have packed its last page
        return Carried(live[is_recomputed], traffic, self._pool_bytes + traffic.staging_bytes)

    @property
    def _pool_bytes(self) -> int:
        """Of one device."""
        return sum(map(shard_bytes, jax.tree.leaves(self.catalogue.pool(self.layout))))

    def settle(self) -> None:
        """Waits until the pool is there."""
        jax.block_until_ready(self.pool)

    def prefill(self, params: Params, sequences: np.ndarray | None = None) -> int:
        """Computes the cache of `sequences`, of all live ones if not given.

        The newest token of a sequence is left to the first decode step, so no logits are needed
        here. Returns the tokens processed.
        """
        scheduler = self.scheduler
        some = scheduler.live if sequences is None else sequences
        groups = scheduler.row[some] // self.num_rows
        admitted: list[Admitted] = []
        for i, g in zip(some, groups, strict=True):
            new = self.pools[g].admit(scheduler.tokens[i, : scheduler.length[i]], 1)
            assert new is not None
            admitted.append(new)
            self.pages[i] = new.pages
        start = np.array([x.num_cached for x in admitted])
        stop = scheduler.length[some] - 1
        todo = start < stop
        spans = Spans(some[todo], groups[todo], start[todo], stop[todo])
        return self._prefill(params, spans) + self._copy(groups, admitted)

    def _prefill(self, params: Params, spans: Spans) -> int:
        catalogue, split = self.catalogue, self.split
        size, blocks = catalogue.page_size, catalogue.prefill_blocks
        for call in prefill_calls(spans, num_groups=split.dp, blocks=blocks, page_size=size):
            length = catalogue.buckets.length_for(call.context)
            tokens = np.zeros((split.dp * blocks, size), np.int32)
            tables = np.full((split.dp * blocks, catalogue.width(length)), NULL_PAGE, np.int32)
            for at, i in enumerate(call.sequence.reshape(-1)):
                if i != NO_SEQUENCE:
                    first, n = call.start.reshape(-1)[at], call.length.reshape(-1)[at]
                    tokens[at, :n] = self.scheduler.tokens[i, first : first + n]
                    pages = self.pages[i][: num_pages_for(int(first + n), size)]
                    tables[at, : len(pages)] = pages
            program = self.programs[Key("prefill", split, blocks, length)]
            self.pool = program(params, self.pool, tokens, call.start.reshape(-1), tables)
            jax.block_until_ready(self.pool)
        return int((spans.stop - spans.start).sum())

    def _copy(self, groups: np.ndarray, admitted: list[Admitted]) -> int:
        split = self.split
        queues = [
            [x.copy for x, of in zip(admitted, groups, strict=True) if of == g and x.copy]
            for g in range(split.dp)
        ]
        for start in range(0, max(map(len, queues)), COPIES):
            pairs = np.full((2, split.dp, COPIES), NULL_PAGE, np.int32)
            for g, queue in enumerate(queues):
                now = np.array(queue[start : start + COPIES], np.int32).reshape(-1, 2)
                pairs[:, g, : len(now)] = now.T
            program = self.programs[Key("copy_pages", split)]
            self.pool = program(self.pool, *pairs.reshape(2, -1))
        return 0

    def _put_rows(self, rows: RowState) -> RowState:
        return jax.device_put(rows, self.layout.sharding("batch"))

    def release(self) -> None:
        """Frees the pool: the update that follows needs the memory."""
        _delete(self.pool)


def _delete(pool: Pool) -> None:
    for leaf in jax.tree.leaves(pool):
        leaf.delete()
