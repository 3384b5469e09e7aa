"""Measures this machine while it warms up: every program of a rollout, run twice, timed once.

The first run of a program creates communicators and pages memory in; the second is timed. What
comes out is the latency model that the planner reads, so warming up and profiling are one thing.
"""

import logging
import time
from collections.abc import Callable, Collection
from itertools import permutations, product
from typing import Any

import jax
import numpy as np

from pat_jax.engine.layout import Layout
from pat_jax.engine.migration import Migration
from pat_jax.engine.pages import Exchange
from pat_jax.engine.programs import Key
from pat_jax.engine.rollout import RolloutEngine
from pat_jax.engine.rounds import ALL, SIZES, Moves
from pat_jax.engine.state import DecodeState, RowState, Until, seen_shape
from pat_jax.models.kv_cache import KVCache
from pat_jax.models.policy import Params
from pat_jax.planning.latency import ROUNDS, TABLES, LatencyModel
from pat_jax.planning.memory import MemoryModel
from pat_jax.planning.types import Split
from pat_jax.profiling.recheck import describe, rescaled

log = logging.getLogger(__name__)

ENOUGH_S = 1.0  # of timed runs of one program


class Warmup:
    """Runs every compiled program of an engine on dummy sequences, layout by layout."""

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        known: LatencyModel | None = None,
        recheck: bool = False,
        memory: MemoryModel | None = None,
        runs: int = 2,
        progress: Callable[[int, int], None] | None = None,
    ):
        """
        Args:
          known: times measured before; what they are of runs untimed.
          recheck: known times are measured once again, and put right where they have changed.
          memory: what has no room is left out; no planner leads there.
          runs: timed runs of one program, fewer where they take longer than a second together.
          progress: told how many programs of how many have run.
        """
        self.engine, self.programs, self.catalogue = engine, engine.programs, engine.catalogue
        self.runs, self.progress, self.memory = runs, progress, memory
        self.recheck = recheck
        self.known, self.new, self.again = ({name: {} for name in TABLES} for _ in range(3))
        if known:
            self.known |= self._usable(known)
        self.done = 0

    def _usable(self, known: LatencyModel) -> dict[str, dict]:
        """The known tables whose entries mean here what they meant there."""
        catalogue, names = self.catalogue, {"decode_table", "reslice_table"}
        if known.round_tokens == self._round_tokens:
            names.add("migrate_table")
        one_call = (catalogue.prefill_rows, catalogue.prefill_chunk)
        if (known.prefill_rows, known.prefill_chunk) == one_call:
            names.add("prefill_table")
        return {name: dict(getattr(known, name)) for name in names}

    @property
    def _round_tokens(self) -> int:
        return SIZES[0] * self.catalogue.page_columns

    @property
    def total(self) -> int:
        """Programs to run; a re-slice counts as one."""
        layouts = len(self.engine.layouts)
        timed = ("decode", "prefill", "resize", "exchange")
        return sum(len(list(self.programs.keys(name))) for name in timed) + layouts * (layouts - 1)

    @property
    def measured(self) -> LatencyModel:
        """All times so far, the known ones included, as far as they hold."""
        tables: dict[str, Any] = {
            name: rescaled(self.known[name], self.again[name]) | self.new[name] for name in TABLES
        }
        return LatencyModel(
            **tables,
            prefill_rows=self.catalogue.prefill_rows,
            prefill_chunk=self.catalogue.prefill_chunk,
            round_tokens=self._round_tokens,
        )

    def measure(
        self,
        load_weights: Callable[[Layout], Params],
        splits: Collection[Split] | None = None,
        *,
        beside: Collection[Split] = (),
    ) -> LatencyModel:
        """The latency model of this engine on this machine.

        Args:
          load_weights: gives the weights on the shards of a layout; the engine deletes them.
          splits: the layouts to run; all where not given.
          beside: layouts that ran before: only switches between them and `splits` do.
        """
        layouts = self.engine.layouts
        new = [layouts[split] for split in (layouts if splits is None else splits)]
        old = [layouts[split] for split in beside]
        pairs = [(a, b) for a, b in permutations([*new, *old], 2) if not (a in old and b in old)]
        for layout in new:
            self.engine.set_weights(load_weights(layout), layout)
            self.decode_and_prefill(layout)
            self._resize(layout)
            self._pages(layout)
            self.engine.release_weights()
        for source, target in pairs:
            self._migrate(source, target)
            self._reslice(source, target, load_weights)
        for name in TABLES:
            for line in describe(name, self.known[name], self.again[name]):
                log.info("%s", line)
        return self.measured

    def _note(self, table: str, key: tuple, once: Callable[[], float], *, per: int = 1) -> None:
        """Notes the fastest run after the first (noise only ever adds time), unless it is known.

        Args:
          once: runs the program; returns the seconds it took.
          per: how many of what is noted one run does.
        """
        once()
        is_known, seconds = key in self.known[table], []
        runs = int(self.recheck) if is_known else self.runs
        while len(seconds) < runs and sum(seconds) < ENOUGH_S:
            seconds.append(once())
        if seconds:
            noted = self.again if is_known else self.new
            noted[table][key] = min(seconds) / per
        self._count()

    def _count(self) -> None:
        self.done += 1
        if self.progress:
            self.progress(self.done, self.total)

    def decode_and_prefill(self, layout: Layout) -> None:
        split, few_rows = layout.split, self.catalogue.prefill_rows
        for length in self.catalogue.buckets.lengths:
            few = self._prefill(layout, length)
            for rows in self.catalogue.buckets.rows[split]:
                if not self._fits(split, rows, length):
                    self._count()
                    continue
                cache = self.programs[Key("allocate", split, rows, length)]()
                insert = self.programs[Key("insert", split, rows, length)]
                picks = np.full(split.dp * few_rows, rows, np.int32)
                for _ in range(2):
                    cache = jax.block_until_ready(insert(cache, few, picks))
                _delete(self._decode(layout, rows, length, cache))
            _delete(few)

    def _prefill(self, layout: Layout, length: int) -> KVCache:
        """Times the last call of a prefill of `length` tokens; returns the cache it has filled."""
        split, few_rows = layout.split, self.catalogue.prefill_rows
        few = self.programs[Key("allocate", split, few_rows, length)]()
        tokens = np.zeros((few_rows * split.dp, self.catalogue.chunk(length)), np.int32)
        program = self.programs[Key("prefill", split, 0, length)]
        begin = np.int32(length - tokens.shape[1])

        def once() -> float:
            nonlocal few
            start = time.perf_counter()
            few = jax.block_until_ready(program(self.engine.params, few, tokens, begin))
            return time.perf_counter() - start

        self._note("prefill_table", (split, length), once)
        return few

    def _decode(self, layout: Layout, rows: int, length: int, cache: KVCache) -> KVCache:
        """Times steps with every row live and near the end of the cache, which it gives back."""
        program = self.programs[Key("decode", layout.split, rows, length)]
        steps = self.catalogue.functions.check_every
        state = RowState.empty(rows * layout.split.dp)
        state.live[:], state.ignore_eos[:] = True, True
        state.position[:], state.end[:] = length - steps, length + steps
        until = Until(np.int32(steps), np.int32(0))
        unseen = np.zeros(seen_shape(self.engine.policy.config, len(state.live)), np.uint32)

        def once() -> float:
            # Positions go back to where they were: each run writes the same columns.
            nonlocal cache
            rows_on_device, seen = jax.device_put((state, unseen), layout.sharding("batch"))
            carried = DecodeState(jax.block_until_ready(rows_on_device), seen, cache)
            start = time.perf_counter()
            carried, _ = jax.block_until_ready(program(self.engine.params, carried, until))
            cache = carried.cache
            return time.perf_counter() - start

        self._note("decode_table", (layout.split, rows, length), once, per=steps)
        return cache

    def _resize(self, layout: Layout) -> None:
        for key in self.programs.keys("resize"):
            if key.split != layout.split:
                continue
            large = max(key.rows, key.to_rows), max(key.length, key.to_length)
            if self._fits(key.split, *large):
                cache = self.programs[Key("allocate", layout.split, key.rows, key.length)]()
                picks = np.zeros(key.to_rows * layout.split.dp, np.int32)
                for _ in range(2):
                    _delete(jax.block_until_ready(self.programs[key](cache, picks)))
                _delete(cache)
            self._count()

    def _fits(self, split: Split, rows: int, length: int) -> bool:
        return self.memory is None or self.memory.holds(split, rows, length)

    def _pages(self, layout: Layout) -> None:
        """Packs and unpacks pages, as many as each staging buffer holds."""
        for key in self.programs.keys("pack"):
            if key.split == layout.split and self._fits(key.split, key.rows, key.length):
                cache = self.programs[Key("allocate", key.split, key.rows, key.length)]()
                unpack = self.programs[key._replace(name="unpack")]
                first = np.zeros(key.to_rows * key.split.dp, np.int32)
                for _ in range(2):
                    cache = unpack(cache, self.programs[key](cache, first, first), first, first)
                _delete(jax.block_until_ready(cache))

    def _migrate(self, source: Layout, target: Layout) -> None:
        """Times rounds of pages between the smallest buckets; what the caches hold besides stays."""
        buckets, columns = self.catalogue.buckets, self.catalogue.page_columns
        exchange, length = Exchange.between(source, target), buckets.lengths[0]
        old, new = (
            self.programs[Key("allocate", layout.split, buckets.rows[layout.split][0], length)]()
            for layout in (source, target)
        )
        migration = Migration(self.catalogue, self.programs, source, target)
        num_groups, most_pages = exchange.narrow.split.dp, length // columns
        for size, kind in product(SIZES, (ALL, *range(num_groups))):
            full, rest = divmod(size, most_pages)
            # Rows that hold `size` pages, those of a group over one another: only time matters here.
            pages = np.array([most_pages] * full + [rest] * (rest > 0))
            groups = np.arange(num_groups) if kind == ALL else np.array([kind])
            zeros = np.zeros(len(groups) * len(pages), int)
            moves = Moves(np.repeat(groups, len(pages)), zeros, zeros, np.tile(pages, len(groups)))

            def once(moves: Moves = moves) -> float:
                nonlocal new
                start = time.perf_counter()
                new, traffic = migration.run(old, new, moves)
                jax.block_until_ready(new)
                assert traffic.num_rounds == 1
                return time.perf_counter() - start

            if size == SIZES[0] and kind in (ALL, 0):
                key = (source.split, target.split, ROUNDS[kind != ALL])
                self._note("migrate_table", key, once)
            else:
                for _ in range(2):
                    once()
                self._count()
        _delete(old)
        _delete(new)

    def _reslice(
        self, source: Layout, target: Layout, load_weights: Callable[[Layout], Params]
    ) -> None:
        def once() -> float:
            self.engine.set_weights(jax.block_until_ready(load_weights(source)), source)
            start = time.perf_counter()
            self.engine.reslice(target)
            seconds = time.perf_counter() - start
            self.engine.release_weights()
            return seconds

        self._note("reslice_table", (source.split, target.split), once)


def _delete(cache: KVCache) -> None:
    for leaf in jax.tree.leaves(cache):
        leaf.delete()
