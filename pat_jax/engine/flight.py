"""One rollout in flight: the cache, the rows, and the moves between buckets and layouts.

Follows the scheduler's accounts with device arrays. Decides nothing: `rollout.py` says when.
"""

from collections.abc import Sequence

import jax
import numpy as np

from pat_jax.engine.catalogue import Catalogue
from pat_jax.engine.layout import Layout
from pat_jax.engine.programs import Key, ProgramTable
from pat_jax.engine.scheduler import Request, Scheduler
from pat_jax.engine.state import DecodeState, RowState, Until
from pat_jax.engine.switch import is_upward, row_order
from pat_jax.models.kv_cache import KVCache
from pat_jax.models.policy import Params
from pat_jax.planning.types import Split


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

    @property
    def cache_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.cache))

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

    def migrate(self, target: Layout) -> None:
        """Carries the cache over to `target` by exchange."""
        source, buckets = self.layout, self.catalogue.buckets
        if is_upward(source, target):
            self._to_rows(self._leaving_rows(target, self.scheduler.fullest))
        else:
            ratio = target.split.dp // source.split.dp
            arriving = buckets.rows_for(target.split, -(-self.scheduler.fullest // ratio))
            self._to_rows(self._leaving_rows(target, arriving * ratio))
            key = Key(
                "resize",
                self.split,
                self.num_rows,
                self.length,
                to_rows=self.num_rows,
                to_length=self.length,
            )
            self._resize(key, self.scheduler.spread(ratio))
        key = Key("migrate", source.split, self.num_rows, self.length, target=target.split)
        self.cache = jax.block_until_ready(self.programs[key](self.cache))
        self.scheduler.reorder(row_order(source, target, self.num_rows), num_groups=target.split.dp)
        self.layout, self._rows = target, None

    def _leaving_rows(self, target: Layout, needed: int) -> int:
        return min(
            rows for rows in self.catalogue.migration_rows(self.layout, target) if rows >= needed
        )

    def move_to(self, target: Layout) -> None:
        """Gives up the cache, deals the sequences out to `target` anew; `prefill` must follow."""
        _delete(self.cache)
        self.layout, split = target, target.split
        rows = self.catalogue.buckets.rows_for(split, -(-len(self.scheduler.live) // split.dp))
        self.scheduler.redeal(num_groups=split.dp, rows_per_group=rows)
        self.cache = self.programs[Key("allocate", split, rows, self.length)]()
        self._rows = None

    def prefill(self, params: Params) -> int:
        """Computes the cache of every live sequence from its tokens, a few rows at a time.

        The newest token of a sequence is left to the first decode step, so no logits are needed
        here. Returns the tokens processed.
        """
        split, few_rows = self.split, self.catalogue.prefill_rows
        few: KVCache = self.programs[Key("allocate", split, few_rows, self.length)]()
        insert = self.programs[Key("insert", split, self.num_rows, self.length)]
        live = self.scheduler.live
        by_group = [live[self.scheduler.row[live] // self.num_rows == g] for g in range(split.dp)]
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
        return int(self.scheduler.length[live].sum()) - len(live)

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
