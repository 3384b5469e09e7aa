"""Measures this machine while it warms up: every program of a rollout, run twice, timed once.

The first run of a program creates communicators and pages memory in; the second is timed. What
comes out is the latency model that the planner reads, so warming up and profiling are one thing.
"""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import permutations, product
from typing import Any

import jax
import numpy as np

from pat_jax.common.hosts.together import company
from pat_jax.engine.device.migration import Migration, Shifting, Traffic
from pat_jax.engine.device.pages import Exchange
from pat_jax.engine.device.program_specs import COPIES
from pat_jax.engine.device.programs import Key
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.layout.layout import Layout
from pat_jax.engine.relocation.rounds import ALL, SHIFT_SIZES, SIZES, Round, Shipment
from pat_jax.engine.sequences.page_allocator import NULL_PAGE
from pat_jax.engine.sequences.prefill_calls import PageMoves
from pat_jax.engine.sequences.state import (
    DecodeState,
    Drafting,
    ModelDrafting,
    Pool,
    ReservedPages,
    RowState,
    Runs,
    Until,
    abstract_drafting,
    seen_shape,
)
from pat_jax.engine.sequences.types import NO_TOKEN
from pat_jax.models.policy import Params
from pat_jax.planning.drafts import KINDS, MOST
from pat_jax.planning.latency.model import ROUNDS, TABLES, LatencyModel
from pat_jax.planning.types import Split
from pat_jax.profiling.measure.recheck import describe, rescaled

log = logging.getLogger(__name__)

Move = Callable[[Pool], tuple[Pool, Traffic]]  # one round of pages
ENOUGH_S = 1.0  # of timed runs of one program
BURST_CHECKS = 4  # of a timed burst: what a burst does once counts for little, as in a rollout


class Warmup:
    """Runs every compiled program of an engine on dummy sequences, layout by layout."""

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        known: LatencyModel | None = None,
        recheck: bool = False,
        runs: int = 2,
        progress: Callable[[int, int], None] | None = None,
    ):
        """
        Args:
          known: times measured before; what they are of runs untimed.
          recheck: known times are measured once again, and put right where they have changed.
          runs: timed runs of one program, fewer where they take longer than a second together.
          progress: told how many programs of how many have run.
        """
        self.engine, self.programs, self.specs = engine, engine.programs, engine.specs
        self.runs, self.progress, self.recheck = runs, progress, recheck
        self.known, self.new, self.again = ({name: {} for name in TABLES} for _ in range(3))
        self.drafts_from = self.specs.drafts_from
        if known and not self.specs.drafts.budgets:
            self.drafts_from = known.drafts_from  # what is known of others' drafts is kept
        if known:
            self.known |= self._usable(known.of_drafts_from(self.drafts_from))
        self.done = 0

    def _usable(self, known: LatencyModel) -> dict[str, dict]:
        """The known tables whose entries mean here what they meant there."""
        specs, names = self.specs, {"decode_table", "verify_table", "reslice_table"}
        if known.round_tokens == self._round_tokens:
            names.add("migrate_table")
        one_call = (specs.prefill_blocks, specs.page_size)
        if (known.prefill_blocks, known.page_size) == one_call:
            names.add("prefill_table")
        return {name: dict(getattr(known, name)) for name in names}

    @property
    def _round_tokens(self) -> int:
        return SIZES[0] * self.specs.page_size

    @property
    def total(self) -> int:
        """Programs to run; a re-slice counts as one."""
        layouts = len(self.engine.layouts)
        counted = ("decode", "prefill", "exchange", "exchange_one", "shift")
        programs = sum(len(list(self.programs.keys(name))) for name in counted)
        return programs + layouts * (layouts - 1)

    @property
    def measured(self) -> LatencyModel:
        """All times so far, the known ones included, as far as they hold."""
        tables: dict[str, Any] = {
            name: rescaled(self.known[name], self.again[name]) | self.new[name] for name in TABLES
        }
        return LatencyModel(
            **tables,
            prefill_blocks=self.specs.prefill_blocks,
            page_size=self.specs.page_size,
            round_tokens=self._round_tokens,
            reads=self.specs.reads,
            drafts_from=self.drafts_from,
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
            pool = self._pages(layout, self.decode_and_prefill(layout))
            _delete(self._shift(layout, pool))
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
            took = once()
            seconds.append(company().agree("seconds of a program", lambda took=took: took))
        if seconds:
            noted = self.again if is_known else self.new
            noted[table][key] = min(seconds) / per
        self._count()

    def _warm(self, once: Callable[[], object]) -> None:
        """Runs a program that is not timed."""
        for _ in range(2):
            once()
        self._count()

    def _count(self) -> None:
        self.done += 1
        if self.progress:
            self.progress(self.done, self.total)

    def decode_and_prefill(self, layout: Layout) -> Pool:
        """Times them in a pool of their own, which is returned."""
        pool = self.programs[Key("allocate", layout.split)]()
        for length in self.specs.buckets.lengths:
            for blocks in sorted(set(self.specs.prefill_sizes), reverse=True):
                pool = self._prefill(layout, blocks, length, pool)
            for rows in self.specs.buckets.rows[layout.split]:
                for budget in (0, *self.specs.drafts.of(rows)):
                    pool = self._decode(layout, rows, length, budget, pool)
        return pool

    def _tables(self, layout: Layout, rows: int, length: int) -> np.ndarray:
        """Every row another page, as far as there are as many."""
        width = self.specs.width(length)
        pages = np.arange(rows * width) % (self.specs.pages[layout.split] - 1) + 1
        return np.tile(pages.astype(np.int32).reshape(rows, width), (layout.split.dp, 1))

    def _prefill(self, layout: Layout, blocks: int, length: int, pool: Pool) -> Pool:
        """Runs a call that ends sequences of `length` tokens; a large one is timed."""
        split, size = layout.split, self.specs.page_size
        tokens = np.zeros((blocks * split.dp, size), np.int32)
        start = np.full(blocks * split.dp, length - size, np.int32)
        tables = self._tables(layout, blocks, length)
        program = self.programs[Key("prefill", split, blocks, length)]

        def once() -> float:
            nonlocal pool
            start_s = time.perf_counter()
            pool = jax.block_until_ready(program(self.engine.params, pool, tokens, start, tables))
            return time.perf_counter() - start_s

        if blocks == self.specs.prefill_blocks:
            self._note("prefill_table", (split, length), once)
        else:
            self._warm(once)
        return pool

    def _decode(self, layout: Layout, rows: int, length: int, budget: int, pool: Pool) -> Pool:
        """Times steps with every row live and near the end of its pages."""
        program = self.programs[Key("decode", layout.split, rows, length, budget=budget)]
        pace = self.specs.functions.pace(budget)
        steps = min(pace.burst_steps, BURST_CHECKS * pace.check_every)
        state = RowState.empty(rows * layout.split.dp)
        state.live[:], state.ignore_eos[:] = True, True
        state.position[:], state.end[:] = max(0, length - steps), length + steps
        is_copied = budget > 0 and not self.specs.drafts.is_said
        drafting = self._nothing_to_draft_from(layout, rows, length) if is_copied else None
        reach = np.zeros((2, KINDS, 1 + MOST), np.float32) if is_copied else None
        drafter, asking = self._drafter(layout, rows, length, budget)
        until = Until(np.int32(steps), np.int32(0), reach)
        tables, nothing = self._tables(layout, rows, length), np.zeros(layout.split.dp, np.int32)
        # It never runs out: the tables are full, and rows may run past their ends.
        ring = np.zeros((layout.split.dp, self.specs.shapes.reserve_size(rows, budget)), np.int32)
        reserved = ReservedPages(ring, np.full(layout.split.dp, 2**30, np.int32))
        unseen = np.zeros(seen_shape(self.engine.policy.config, len(state.live)), np.uint32)

        def once() -> float:
            # Positions go back to where they were: each run writes the same tokens.
            nonlocal pool, asking
            rows_on_device, seen, pages, none_drawn, blank = layout.put(
                (state, unseen, tables, nothing, drafting), "batch"
            )
            jax.block_until_ready(rows_on_device)
            carried = DecodeState(rows_on_device, seen, pool, pages, none_drawn, blank, asking)
            start = time.perf_counter()
            carried, _ = jax.block_until_ready(
                program(self.engine.params, carried, reserved, until, drafter)
            )
            pool, asking = carried.pool, carried.asking
            return time.perf_counter() - start

        at = layout.split, rows, length
        if budget:
            self._note("verify_table", (*at, budget), once, per=steps)
        else:
            self._note("decode_table", at, once, per=steps)
        return pool

    def _drafter(
        self, layout: Layout, rows: int, length: int, budget: int
    ) -> tuple[Any, ModelDrafting | None]:
        """Who says drafts, and a draft model's cache."""
        if not budget or not self.specs.draft_specs:
            return (self.engine.weights.exit_head if budget else None), None
        specs, model = self.specs.draft_specs, self.engine.draft_model
        assert model is not None, "set_draft_model comes first"
        pool = self.programs[Key("draft_allocate", layout.split)]()
        count, width = rows * layout.split.dp, specs.width(length)
        pages = np.arange(count * width) % (specs.pages(layout.split) - 1) + 1
        tables = pages.astype(np.int32).reshape(count, width)
        placed = layout.put((tables, np.zeros(count, np.int32)), "batch")
        return model.params, ModelDrafting(pool, *placed)

    def _nothing_to_draft_from(self, layout: Layout, rows: int, length: int) -> Drafting:
        """A step takes as long whatever it finds."""
        size, drafts = self.specs.width(length) * self.specs.page_size, self.specs.drafts
        room = self.specs.text_room(length)
        like = abstract_drafting(layout, rows, size, drafts.longest, room)
        text: Any = np.full(like.text.shape, NO_TOKEN, np.int32)
        borders: Any = np.zeros(like.borders.shape, np.int32)
        return Drafting(text, Runs.none(len(text)), borders)

    def _pages(self, layout: Layout, pool: Pool) -> Pool:
        """Copies pages; untimed."""
        split = layout.split
        none = np.full(COPIES * split.dp, NULL_PAGE, np.int32)
        for _ in range(2):
            pool = self.programs[Key("copy_pages", split)](pool, none, none)
        return jax.block_until_ready(pool)

    def _migrate(self, source: Layout, target: Layout) -> None:
        """Times rounds of pages; what the pool holds does not matter."""
        num_groups = Exchange.between(source, target).narrow.split.dp
        for _ in range(2):
            pool = self.programs[Key("allocate", source.split)]()
            pool = self.programs[Key("view", source.split, target=target.split)](pool)
        migration = Migration(self.programs, source, target)
        for size, kinds in product(SIZES, ((ALL,), range(num_groups))):
            pages = np.full((num_groups, size), NULL_PAGE)
            rounds = [Shipment(Round(kind, size), pages, pages, put=(0,)) for kind in kinds]
            moves = [partial(migration.run, shipments=[one]) for one in rounds]
            key = (source.split, target.split, ROUNDS[kinds[0] != ALL])
            pool = self._rounds(key if size == SIZES[0] else None, moves, pool)
        _delete(pool)

    def _shift(self, layout: Layout, pool: Pool) -> Pool:
        """Times a round between the groups of a layout; what the pool holds does not matter."""
        split, shifting = layout.split, Shifting(self.programs, layout)
        for size in SHIFT_SIZES if split.dp > 1 else ():
            groups, pages = np.zeros(size, int), np.full(size, NULL_PAGE)
            # DP axes count outermost first, innermost mesh axis first: neighbours are farthest apart.
            far = [PageMoves(groups, pages, groups + i, pages) for i in range(1, split.dp)]
            moves = [partial(shifting.run, moves=one) for one in far]
            key = (split, split, ROUNDS[0]) if size == SHIFT_SIZES[0] else None
            pool = self._rounds(key, moves, pool)
        return pool

    def _rounds(self, key: tuple | None, moves: Sequence[Move], pool: Pool) -> Pool:
        """Runs one program's rounds of pages; notes under `key`, if there is one, what the first takes."""

        def once(move: Move) -> float:
            nonlocal pool
            start = time.perf_counter()
            pool, traffic = move(pool)
            jax.block_until_ready(pool)
            assert traffic.num_rounds == 1
            return time.perf_counter() - start

        for move in (*moves[1:], *moves[1:]):
            once(move)
        if key is not None:
            self._note("migrate_table", key, partial(once, moves[0]))
        else:
            self._warm(partial(once, moves[0]))
        return pool

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


def _delete(pool: Pool) -> None:
    for leaf in jax.tree.leaves(pool):
        leaf.delete()
