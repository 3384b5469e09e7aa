"""One rollout in flight: the cache, the rows, and the moves between buckets and layouts.

Follows the scheduler's accounts with device arrays. Decides nothing: `rollout.py` says when.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from pat_jax.engine.catalogue import Catalogue
from pat_jax.engine.layout import Layout, shard_bytes
from pat_jax.engine.migration import Migration, Traffic
from pat_jax.engine.programs import Key, ProgramTable
from pat_jax.engine.rounds import Moves
from pat_jax.engine.scheduler import Request, Scheduler
from pat_jax.engine.state import DecodeState, RowState, Until
from pat_jax.models.kv_cache import KVCache
from pat_jax.models.policy import Params
from pat_jax.planning.types import Split


@dataclass(frozen=True)
class Carried:
    """How the sequences went to another layout."""

    recomputed: np.ndarray  # int[sequences], those whose cache is still to be computed
    traffic: Traffic
    extra_bytes: int  # of a device, at most, besides the cache left behind


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
        self.scheduler.deal()
        self.length = buckets.length_for(max(len(r.tokens) for r in requests))
        self.cache: KVCache = programs[Key("allocate", split, rows, self.length)]()
        self._rows: RowState | None = None  # None: the host's copy is newer

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
        state, output = program(params, DecodeState(self._rows, self.cache), until)
        self._rows, self.cache = state.rows, state.cache
        output, still_live = jax.device_get((output, state.rows.live))
        return int(output.steps), self.scheduler.retire(output, still_live)

    def steps_possible(self) -> int:
        """Decode steps before a live sequence would outgrow the cache."""
        live = self.scheduler.live
        if int(self.scheduler.end[live].max()) - 1 <= self.length:
            return self.catalogue.functions.burst_steps
        return self.length - self.scheduler.max_context

    def fit(self) -> None:
        """Shrinks the rows to the smallest bucket that holds the live sequences; grows the length."""
        buckets, check_every = self.catalogue.buckets, self.catalogue.functions.check_every
        self._to_rows(buckets.rows_for(self.split, self.scheduler.fullest))
        if self.steps_possible() < check_every:
            live = self.scheduler.live
            longest = min(
                int(self.scheduler.end[live].max()) - 1, self.scheduler.max_context + check_every
            )
            self._to_length(buckets.length_for(longest))

    def _to_rows(self, target: int) -> None:
        path = self.catalogue.buckets.row_path(self.split, self.num_rows, target)
        for rows in path[1:]:
            key = Key(
                "resize",
                self.split,
                self.num_rows,
                self.length,
                to_rows=rows,
                to_length=self.length,
            )
            self._resize(key, self.scheduler.compact(rows))

    def _to_length(self, target: int) -> None:
        for length in self.catalogue.buckets.length_path(self.length, target)[1:]:
            key = Key(
                "resize",
                self.split,
                self.num_rows,
                self.length,
                to_rows=self.num_rows,
                to_length=length,
            )
            self._resize(key, self.scheduler.compact(self.num_rows))
            self.length = length

    def _resize(self, key: Key, picks: np.ndarray) -> None:
        old, self.cache = self.cache, self.programs[key](self.cache, picks)
        # Wait, then free: the two caches differ in size, so donation could not reuse the old one.
        jax.block_until_ready(self.cache)
        _delete(old)
        self._rows = None

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
        allocate = self.programs[Key("allocate", split, rows, self.length)]
        self.layout, self._rows = target, None
        if is_recomputed.all():
            _delete(self.cache)
            self.cache = allocate()
            extra_bytes = self._cache_bytes(rows) + self._cache_bytes(self.catalogue.prefill_rows)
            return Carried(live, Traffic(), extra_bytes)
        migration = Migration(self.catalogue, self.programs, source, target)
        narrow, wide = (before, after) if migration.exchange.is_up else (after, before)
        pages = -(-(scheduler.length[live] - 1) // self.catalogue.page_columns)
        stay = ~is_recomputed
        moves = Moves(narrow[0][stay], narrow[1][stay], wide[1][stay], pages[stay])
        old = self.cache
        self.cache, traffic = migration.run(old, allocate(), moves)
        _delete(old)  # the devices free it when they have packed its last page
        extra_bytes = self._cache_bytes(rows) + traffic.staging_bytes
        if is_recomputed.any():
            extra_bytes += self._cache_bytes(self.catalogue.prefill_rows)
        return Carried(live[is_recomputed], traffic, extra_bytes)

    def _cache_bytes(self, rows: int) -> int:
        """Of one device."""
        cache = self.catalogue.cache(self.layout, rows, self.length)
        return sum(map(shard_bytes, jax.tree.leaves(cache)))

    def settle(self) -> None:
        """Waits until the cache is there."""
        jax.block_until_ready(self.cache)

    def prefill(self, params: Params, sequences: np.ndarray | None = None) -> int:
        """Computes the cache of `sequences`, of all live ones if not given, a few rows at a time.

        The newest token of a sequence is left to the first decode step, so no logits are needed
        here. Returns the tokens processed.
        """
        split, few_rows = self.split, self.catalogue.prefill_rows
        few: KVCache = self.programs[Key("allocate", split, few_rows, self.length)]()
        insert = self.programs[Key("insert", split, self.num_rows, self.length)]
        some = self.scheduler.live if sequences is None else sequences
        by_group = [some[self.scheduler.row[some] // self.num_rows == g] for g in range(split.dp)]
        # Rows of like length go together: a call is as long as its longest row.
        by_group = [
            group[np.argsort(self.scheduler.length[group], kind="stable")] for group in by_group
        ]
        for start in range(0, max(map(len, by_group)), few_rows):
            members = [group[start : start + few_rows] for group in by_group]
            few = self._prefill_few(params, few, members)
            picks = np.full((split.dp, few_rows), self.num_rows, np.int32)
            for g, group in enumerate(members):
                picks[g, : len(group)] = self.scheduler.row[group] - g * self.num_rows
            self.cache = insert(self.cache, few, picks.reshape(-1))
        jax.block_until_ready(self.cache)
        _delete(few)
        return int(self.scheduler.length[some].sum()) - len(some)

    def _prefill_few(self, params: Params, few: KVCache, members: list[np.ndarray]) -> KVCache:
        rows, chunk = self.catalogue.prefill_rows, self.catalogue.chunk(self.length)
        program = self.programs[Key("prefill", self.split, 0, self.length)]
        tokens = np.zeros((len(members) * rows, self.length), np.int32)
        longest = 0
        for g, group in enumerate(members):
            known = self.scheduler.tokens[group, : self.length]
            tokens[g * rows : g * rows + len(group), : known.shape[1]] = known
            longest = max(longest, int(self.scheduler.length[group].max(initial=0)) - 1)
        for start in range(0, longest, chunk):
            few = program(params, few, tokens[:, start : start + chunk], np.int32(start))
        return few

    def _put_rows(self, rows: RowState) -> RowState:
        return jax.device_put(rows, self.layout.sharding("batch"))

    def release(self) -> None:
        """Frees the cache: the update that follows needs the memory."""
        _delete(self.cache)


def _delete(cache: KVCache) -> None:
    for leaf in jax.tree.leaves(cache):
        leaf.delete()
