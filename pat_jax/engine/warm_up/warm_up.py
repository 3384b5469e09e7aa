"""Measures this machine while it warms up: every program of a rollout, run until its time is known.

The first run of a program creates communicators and pages memory in, so at least one other is timed. What
comes out is the latency model that the planner reads, so warming up and profiling are one thing.
"""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import combinations, permutations, product
from typing import Any, NamedTuple

import jax
import numpy as np

from pat_jax.common.hosts.together import company
from pat_jax.common.memory import give_back
from pat_jax.engine.device.pages.migration import Migration, Shifting, Traffic
from pat_jax.engine.device.pages.pages import Exchange
from pat_jax.engine.device.programs.program_specs import COPIES
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.relocation.rounds import ALL, SHIFT_SIZES, SIZES, Round, Shipment
from pat_jax.engine.sequences.page_allocator import NULL_PAGE
from pat_jax.engine.sequences.prefill_calls import PageMoves
from pat_jax.engine.sequences.state import (
    DecodeState,
    Pool,
    Until,
    seen_shape,
)
from pat_jax.engine.warm_up.dummy_bursts import DummyBursts
from pat_jax.engine.warm_up.recheck import describe, rescaled
from pat_jax.layout.layout import Layout
from pat_jax.models.policy import Params
from pat_jax.planning.drafts import KINDS, MOST
from pat_jax.planning.latency.model import ROUNDS, TABLES, LatencyModel
from pat_jax.planning.types import Split
from pat_jax.programs.programs import Key

log = logging.getLogger(__name__)

Move = Callable[[Pool], tuple[Pool, Traffic]]  # one round of pages
ENOUGH_S = 1.0  # of runs of one program behind its first


class Timed(NamedTuple):
    """A program whose time is wanted."""

    table: str
    key: tuple
    once: Callable[[], float]  # runs it; returns the seconds it took
    per: int = 1  # how many of what is noted one run does


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
          recheck: known times are measured once again, and put right where they have changed. On a
            CPU where few programs are measured, these are only those of the first known layout's
            bursts of fewest rows; they stand for all.
          runs: of one program behind its first, fewer once these have taken a second.
          progress: told how many programs of how many have run.
        """
        self.engine, self.programs, self.specs = engine, engine.programs, engine.specs
        self.dummy = DummyBursts(engine)
        self.runs, self.progress, self.recheck = runs, progress, recheck
        self.known, self.new, self.again = ({name: {} for name in TABLES} for _ in range(3))
        self.drafts_from = self.specs.drafts_from
        if known and not self.specs.drafts.budgets:
            self.drafts_from = known.drafts_from  # what is known of others' drafts is kept
        if known:
            self.known |= self._usable(known.of_drafts_from(self.drafts_from))
        self.done = 0
        self.sample: Split | None = None  # whose bursts tell how all known layouts have changed
        # A CPU has no communicators to create: where few programs are measured there, none has to run before
        # it is needed, and a first run of a second is as good as others.
        platform = next(iter(engine.layouts.values())).platform
        self.is_brief = platform == "cpu" and self.specs.first is not None

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
        """Programs to run; a reshard counts as one."""
        layouts = len(self.engine.layouts)
        counted = ("decode", "prefill", "exchange", "exchange_one", "shift")
        programs = sum(len(list(self.programs.keys(name))) for name in counted)
        return programs + layouts * (layouts - 1)

    @property
    def measured(self) -> LatencyModel:
        """All times so far, the known ones included, as far as they hold."""
        tables: dict[str, Any] = {
            name: rescaled(self.known[name], self.again[name], self.sample) | self.new[name]
            for name in TABLES
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
            if self.is_brief and self._is_known(layout):
                if self.sample is not None or not self.recheck:
                    continue
                self.sample = layout.split
            self.engine.set_weights(load_weights(layout), layout)
            pool = self._pages(layout, self.decode_and_prefill(layout))
            _delete(self._shift(layout, pool))
            self.engine.release_weights()
            give_back()
        for source, target in pairs:
            self._migrate(source, target)
            give_back()
        for one, other in combinations([*new, *old], 2):
            if one in new or other in new:
                self._reslice(one, other, load_weights)
                give_back()
        for name in TABLES:
            for line in describe(name, self.known[name], self.again[name]):
                log.info("%s", line)
        return self.measured

    def _note(self, *programs: Timed) -> None:
        """Notes the fastest run of each (noise only ever adds time), unless it is known.

        Several run by turns: what the machine does beside them hits one as it hits another.
        """
        is_known = [program.key in self.known[program.table] for program in programs]
        wanted = [int(self.recheck) if known else self.runs for known in is_known]
        seconds: list[list[float]] = [[] for _ in programs]
        for nth in range(1 + max(wanted)):
            for program, runs, took in zip(programs, wanted, seconds, strict=True):
                if nth > runs or sum(took[0 if self.is_brief else 1 :]) >= ENOUGH_S:
                    continue
                here_s = program.once()
                took.append(company().agree("seconds of a program", lambda here_s=here_s: here_s))
        for program, known, runs, took in zip(programs, is_known, wanted, seconds, strict=True):
            if runs:
                noted = self.again if known else self.new
                noted[program.table][program.key] = min(took) / program.per
            self._count()

    def _is_taken(self, table: str, *keys: tuple) -> bool:
        """Whether times are taken as they are known, and their programs need not run."""
        return self.is_brief and all(key in self.known[table] for key in keys)

    def _is_known(self, layout: Layout) -> bool:
        """Whether the times of all its programs are."""
        split, measured, known = layout.split, self.specs.measured, self.known
        if split.dp > 1 and (split, split, ROUNDS[0]) not in known["migrate_table"]:
            return False
        if not all((split, length) in known["prefill_table"] for length in measured.lengths):
            return False
        at = [(split, *one) for one in product(measured.rows[split], measured.lengths)]
        drafting = [(*one, budget) for one in at for budget in self.specs.drafts.of(one[1])]
        tables = (known["decode_table"], at), (known["verify_table"], drafting)
        return all(one in table for table, ones in tables for one in ones)

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
        for length in self.specs.measured.lengths:
            for blocks in sorted(set(self.specs.prefill_sizes), reverse=True):
                pool = self._prefill(layout, blocks, length, pool)
            for rows in self.specs.measured.rows[layout.split]:
                pool = self._decode(layout, rows, length, pool)
        return pool

    def _prefill(self, layout: Layout, blocks: int, length: int, pool: Pool) -> Pool:
        """Runs a call that ends sequences of `length` tokens; a large one is timed."""
        split, size = layout.split, self.specs.page_size
        is_timed = blocks == self.specs.prefill_blocks
        if self._is_taken("prefill_table", (split, length)) or (self.is_brief and not is_timed):
            self._count()
            return pool
        tokens = np.zeros((blocks * split.dp, size), np.int32)
        start = np.full(blocks * split.dp, length - size, np.int32)
        tables = self.dummy.tables(layout, blocks, length)
        program = self.programs[Key("prefill", split, blocks, length)]

        def once() -> float:
            nonlocal pool
            start_s = time.perf_counter()
            pool = jax.block_until_ready(program(self.engine.params, pool, tokens, start, tables))
            return time.perf_counter() - start_s

        if is_timed:
            self._note(Timed("prefill_table", (split, length), once))
        else:
            self._warm(once)
        return pool

    def _decode(self, layout: Layout, rows: int, length: int, pool: Pool) -> Pool:
        """Times steps with each budget of drafts, every row live and near the end of its pages."""
        budgets = self.specs.drafts.of(rows)
        at = layout.split, rows, length
        is_known = self._is_taken("decode_table", at)
        is_known &= self._is_taken("verify_table", *((*at, budget) for budget in budgets))
        if is_known and rows > self.specs.measured.rows[layout.split][0]:
            self._count()
            return pool
        drafter, asking = self.dummy.drafter(layout, rows, length)
        texts = self.dummy.texts(layout, rows, length)
        tables, none_drawn = (
            self.dummy.tables(layout, rows, length),
            np.zeros(layout.split.dp, np.int32),
        )
        unseen = np.zeros(seen_shape(self.engine.policy.config, rows * layout.split.dp), np.uint32)

        def timed(budget: int) -> Timed:
            program = self.programs[Key("decode", layout.split, rows, length, budget=budget)]
            steps, state, reserved = self.dummy.burst(layout, rows, length, budget)
            drafting = texts if budget else None
            reach = None if drafting is None else np.zeros((2, KINDS, 1 + MOST), np.float32)
            until = Until(np.int32(steps), np.int32(0), reach)

            def once() -> float:
                # Positions go back to where they were: each run writes the same tokens.
                nonlocal pool, asking
                rows_on_device, seen, pages, drawn, blank = layout.put(
                    (state, unseen, tables, none_drawn, drafting), "batch"
                )
                jax.block_until_ready(rows_on_device)
                asked = asking if budget else None
                carried = DecodeState(rows_on_device, seen, pool, pages, drawn, blank, asked)
                says = drafter if budget else None
                start = time.perf_counter()
                carried, _ = jax.block_until_ready(
                    program(self.engine.params, carried, reserved, until, says)
                )
                pool = carried.pool
                if budget:
                    asking = carried.asking
                return time.perf_counter() - start

            if budget:
                return Timed("verify_table", (*at, budget), once, per=steps)
            return Timed("decode_table", at, once, per=steps)

        self._note(*map(timed, (0, *budgets)))
        return pool

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
        pair = source.split, target.split
        if self._is_taken("migrate_table", *((*pair, kind) for kind in ROUNDS)):
            return
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
        if self._is_taken("migrate_table", (split, split, ROUNDS[0])):
            return pool
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
            self._note(Timed("migrate_table", key, partial(once, moves[0])))
        else:
            self._warm(partial(once, moves[0]))
        return pool

    def _reslice(
        self, one: Layout, other: Layout, load_weights: Callable[[Layout], Params]
    ) -> None:
        """Times both ways, of the same weights there and back."""
        ways = ((one, other), (other, one))
        if self._is_taken("reslice_table", *((a.split, b.split) for a, b in ways)):
            return

        def once(source: Layout, target: Layout) -> float:
            if self.engine.layout is None or self.engine.layout.split != source.split:
                self.engine.release_weights()
                self.engine.set_weights(jax.block_until_ready(load_weights(source)), source)
            start = time.perf_counter()
            self.engine.reslice(target)
            return time.perf_counter() - start

        self._note(
            *(Timed("reslice_table", (a.split, b.split), partial(once, a, b)) for a, b in ways)
        )
        self.engine.release_weights()


def _delete(pool: Pool) -> None:
    for leaf in jax.tree.leaves(pool):
        leaf.delete()
