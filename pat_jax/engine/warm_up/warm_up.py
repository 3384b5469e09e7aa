"""The warm-up: runs every program of a rollout on this machine until its time is known.

The first run of a program creates communicators and pages memory in, so at least one more run is
timed. The result is the latency model that the planner uses. So warming up and profiling are the
same.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations, permutations, product

import jax
import numpy as np

from pat_jax.common.memory import give_back
from pat_jax.engine.device.pages.migration import Migration, shifted
from pat_jax.engine.device.pages.pages import Exchange
from pat_jax.engine.device.programs.program_specs import COPIES
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.relocation.rounds import ALL, SHIFT_SIZES, SIZES, Round, Shipment
from pat_jax.engine.sequences.page_allocator import NULL_PAGE
from pat_jax.engine.sequences.prefill_calls import MovedBytes, PageMoves
from pat_jax.engine.sequences.state import Pool, no_routes
from pat_jax.engine.warm_up.dummy_bursts import DummyBursts, dummy_tables
from pat_jax.engine.warm_up.timings import Timed, Timings
from pat_jax.layout.layout import Layout
from pat_jax.models.policy import Params
from pat_jax.planning.latency.model import ROUNDS, LatencyModel
from pat_jax.programs.programs import Key

Move = Callable[[Pool], tuple[Pool, MovedBytes]]  # moves the pages of one round


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
          known: seconds of programs measured before; programs with a known time run untimed.
          recheck: measure known times once again, and rescale them if they have changed. On a CPU
            with few measured programs, only bursts of fewest rows in the first known layout are
            measured again; they stand for all bursts.
          runs: timed runs of each program after its first; fewer once they have taken a second.
          progress: called with the numbers of programs that have run and of all programs.
        """
        self.engine = engine
        self.programs = engine.programs
        self.specs = engine.specs
        self.timings = Timings(engine.specs, known, recheck=recheck, runs=runs)
        self.progress = progress
        self.done = 0

    @property
    def total(self) -> int:
        """The number of programs to run, once for each length; each resharding of all weights
        counts as one."""
        layouts = len(self.engine.layouts)
        counted = ("decode", "prefill", "exchange", "exchange_one", "shift")
        runs = sum(self._runs(key) for name in counted for key in self.programs.keys(name))
        return runs + layouts * (layouts - 1)

    def _runs(self, key: Key) -> int:
        """Returns how many contexts the warm-up measures by a program; 1 if it has no length."""
        shapes = self.specs.shapes
        lengths = self.specs.measured.lengths
        programs = [shapes.length_for(length, key.num_draft_tokens) for length in lengths]
        return programs.count(key.length) if key.length else 1

    @property
    def measured(self) -> LatencyModel:
        """The latency model so far: times measured now, and those known before that still hold."""
        return self.timings.measured

    def measure(self, load_weights: Callable[[Layout], Params]) -> LatencyModel:
        """Runs the programs and returns the latency model of this engine on this machine.

        Args:
          load_weights: returns the weights sharded for a layout; the engine deletes them.
        """
        layouts = list(self.engine.layouts.values())
        timings = self.timings
        for layout in layouts:
            if timings.is_brief and timings.know_all_of(layout):
                if timings.sample is not None or not timings.recheck:
                    continue
                timings.sample = layout.split
            self.engine.set_weights(load_weights(layout), layout)
            pool = self._pages(layout, self.decode_and_prefill(layout))
            _delete(self._shift(layout, pool))
            self.engine.release_weights()
            give_back()
        for source, target in permutations(layouts, 2):
            self._migrate(source, target)
            give_back()
        for one, other in combinations(layouts, 2):
            self._reshard(one, other, load_weights)
            give_back()
        timings.log_changes()
        return timings.measured

    def _note(self, *programs: Timed) -> None:
        self.timings.note(*programs)
        for _ in programs:
            self._count()

    def _warm(self, once: Callable[[], object]) -> None:
        """Runs a program twice without timing it."""
        for _ in range(2):
            once()
        self._count()

    def _count(self) -> None:
        self.done += 1
        if self.progress:
            self.progress(self.done, self.total)

    def decode_and_prefill(self, layout: Layout) -> Pool:
        """Times a layout's decode and prefill programs in a new pool, and returns the pool."""
        pool = self.programs[Key("allocate", layout.split)]()
        for length in self.specs.measured.lengths:
            for blocks in sorted(set(self.specs.prefill_sizes), reverse=True):
                pool = self._prefill(layout, blocks, length, pool)
            for rows in self.specs.measured.rows[layout.split]:
                pool = self._decode(layout, rows, length, pool)
        return pool

    def _prefill(self, layout: Layout, blocks: int, length: int, pool: Pool) -> Pool:
        """Runs prefill calls at the end of sequences of `length` tokens; times the large ones."""
        split = layout.split
        size = self.specs.page_size
        is_timed = blocks == self.specs.prefill_blocks
        is_known = self.timings.are_taken("prefill_table", (split, length))
        if is_known or (self.timings.is_brief and not is_timed):
            self._count()
            return pool
        tokens = np.zeros((blocks * split.dp, size), np.int32)
        start = np.full(blocks * split.dp, length - size, np.int32)
        compiled = self.specs.buckets.length_for(length)
        tables = dummy_tables(self.specs, layout, blocks, length, compiled)
        recorded = no_routes(self.specs.functions.policy.config, *tokens.shape)
        program = self.programs[Key("prefill", split, blocks, compiled)]

        def once() -> float:
            nonlocal pool
            start_s = time.perf_counter()
            pool, _ = jax.block_until_ready(
                program(self.engine.params, pool, tokens, start, tables, recorded)
            )
            return time.perf_counter() - start_s

        if is_timed:
            self._note(Timed("prefill_table", (split, length), once))
        else:
            self._warm(once)
        return pool

    def _decode(self, layout: Layout, rows: int, length: int, pool: Pool) -> Pool:
        """Times decode steps with each number of draft tokens, all rows running."""
        numbers = self.specs.measured_drafts(layout.split, rows, length)
        at = layout.split, rows, length
        is_known = self.timings.are_taken("decode_table", at)
        is_known &= self.timings.are_taken(
            "verify_table", *((*at, num_draft_tokens) for num_draft_tokens in numbers)
        )
        if is_known and rows > self.specs.measured.rows[layout.split][0]:
            self._count()
            return pool
        bursts = DummyBursts(self.engine, layout, rows, length, pool)
        self._note(*map(bursts.timed, (0, *numbers)))
        return bursts.pool

    def _pages(self, layout: Layout, pool: Pool) -> Pool:
        """Runs the program that copies pages, untimed."""
        split = layout.split
        none = np.full(COPIES * split.dp, NULL_PAGE, np.int32)
        for _ in range(2):
            pool = self.programs[Key("copy_pages", split)](pool, none, none)
        return jax.block_until_ready(pool)

    def _migrate(self, source: Layout, target: Layout) -> None:
        """Times the rounds of a migration; the pool's content does not matter."""
        num_replicas = Exchange.between(source, target).narrow.split.dp
        pair = source.split, target.split
        if self.timings.are_taken("migrate_table", *((*pair, kind) for kind in ROUNDS)):
            return
        for _ in range(2):
            pool = self.programs[Key("allocate", source.split)]()
            pool = self.programs[Key("view", source.split, target=target.split)](pool)
        migration = Migration(self.programs, source, target)
        for size, kinds in product(SIZES, ((ALL,), range(num_replicas))):
            pages = np.full((num_replicas, size), NULL_PAGE)
            rounds = [Shipment(Round(kind, size), pages, pages, put=(0,)) for kind in kinds]
            moves = [partial(migration.run, shipments=[one]) for one in rounds]
            key = (source.split, target.split, ROUNDS[kinds[0] != ALL])
            pool = self._rounds(key if size == SIZES[0] else None, moves, pool)
        _delete(pool)

    def _shift(self, layout: Layout, pool: Pool) -> Pool:
        """Times a round of pages between a layout's replicas; the pool may have any content."""
        split = layout.split
        run = partial(shifted, self.programs, layout)
        if self.timings.are_taken("migrate_table", (split, split, ROUNDS[0])):
            return pool
        for size in SHIFT_SIZES if split.dp > 1 else ():
            replicas, pages = np.zeros(size, int), np.full(size, NULL_PAGE)
            # DP axes count outermost first, innermost mesh axis first: neighbours are farthest apart.
            far = [PageMoves(replicas, pages, replicas + i, pages) for i in range(1, split.dp)]
            moves = [partial(run, moves=one) for one in far]
            key = (split, split, ROUNDS[0]) if size == SHIFT_SIZES[0] else None
            pool = self._rounds(key, moves, pool)
        return pool

    def _rounds(self, key: tuple | None, moves: Sequence[Move], pool: Pool) -> Pool:
        """Runs `moves`, which use one program; records the first one's time if `key` is given."""

        def once(move: Move) -> float:
            nonlocal pool
            start = time.perf_counter()
            pool, _ = move(pool)
            jax.block_until_ready(pool)
            return time.perf_counter() - start

        for move in (*moves[1:], *moves[1:]):
            once(move)
        if key is not None:
            self._note(Timed("migrate_table", key, partial(once, moves[0])))
        else:
            self._warm(partial(once, moves[0]))
        return pool

    def _reshard(
        self, one: Layout, other: Layout, load_weights: Callable[[Layout], Params]
    ) -> None:
        """Times resharding the same weights from one layout to another and back."""
        ways = ((one, other), (other, one))
        if self.timings.are_taken("reshard_table", *((a.split, b.split) for a, b in ways)):
            return

        def once(source: Layout, target: Layout) -> float:
            if self.engine.layout is None or self.engine.layout.split != source.split:
                self.engine.release_weights()
                self.engine.set_weights(jax.block_until_ready(load_weights(source)), source)
            start = time.perf_counter()
            self.engine.weights.reshard(target)
            return time.perf_counter() - start

        self._note(
            *(Timed("reshard_table", (a.split, b.split), partial(once, a, b)) for a, b in ways)
        )
        self.engine.release_weights()


def _delete(pool: Pool) -> None:
    for leaf in jax.tree.leaves(pool):
        leaf.delete()
