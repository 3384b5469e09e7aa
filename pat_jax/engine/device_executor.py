"""Executes a rollout on devices: prefill, bursts dispatched one behind another, and moves.

Keeps device arrays in line with the host's accounts: rows, and pages of the KV cache. Decides
nothing: `scheduler.py` and the cache manager do.
"""

import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from pat_jax.common.hosts.together import process_group
from pat_jax.common.stopwatch import Stopwatch
from pat_jax.engine.by_need import decode_key
from pat_jax.engine.device.draft.drafter import Rollout
from pat_jax.engine.device.pages.migration import Migration, shifted
from pat_jax.engine.device.programs.program_specs import COPIES, ProgramSpecs
from pat_jax.engine.device.programs.weights import Weights
from pat_jax.engine.executor import Arrival, Burst, Executor, Relocation
from pat_jax.engine.relocation.order import Pools, placed
from pat_jax.engine.relocation.rounds import Shipment
from pat_jax.engine.sequences.block_tables import BlockTables
from pat_jax.engine.sequences.contents import RowsOutput
from pat_jax.engine.sequences.earlier import EarlierResponses
from pat_jax.engine.sequences.page_allocator import NULL_PAGE
from pat_jax.engine.sequences.prefill_calls import Copies, MovedBytes, PageMoves, PrefillWork
from pat_jax.engine.sequences.responses import Responses
from pat_jax.engine.sequences.state import (
    BurstOutput,
    DecodeState,
    Pool,
    RowState,
    Until,
    seen_shape,
)
from pat_jax.layout.buckets import Shape
from pat_jax.layout.layout import Layout
from pat_jax.programs.programs import Key, ProgramTable


class DevicePool:
    """The pools of all replicas of a layout. Methods dispatch programs; `settle` waits for them."""

    def __init__(self, specs: ProgramSpecs, programs: ProgramTable, layout: Layout):
        self.specs = specs
        self.programs = programs
        self.layout = layout
        self.pages: Pool = programs[Key("allocate", layout.split)]()

    def copy(self, copies: Copies) -> None:
        """Copies each source page to its target page in the same replica."""
        split = self.layout.split
        program = self.programs[Key("copy_pages", split)]
        queues = [np.flatnonzero(copies.replica == g) for g in range(split.dp)]
        for begin in range(0, max(map(len, queues)), COPIES):
            pairs = np.full((2, split.dp, COPIES), NULL_PAGE, np.int32)
            for g, queue in enumerate(queues):
                now = queue[begin : begin + COPIES]
                pairs[:, g, : len(now)] = copies.source[now], copies.target[now]
            sources, targets = pairs.reshape(2, -1)
            self.pages = program(self.pages, sources, targets)

    def migrate(self, target: Layout, shipments: Sequence[Shipment]) -> MovedBytes:
        """Moves pages to the replicas of another layout; pages not in `shipments` are lost."""
        source = self.layout
        self.layout = target
        self.pages = self.programs[Key("view", source.split, target=target.split)](self.pages)
        migration = Migration(self.programs, source, target)
        self.pages, sent = migration.run(self.pages, shipments)
        return sent

    def shift(self, moves: PageMoves) -> MovedBytes:
        """Moves pages to other replicas of the same layout."""
        self.pages, sent = shifted(self.programs, self.layout, self.pages, moves)
        return sent

    def settle(self) -> None:
        """Waits until all dispatched copies and moves are done."""
        jax.block_until_ready(self.pages)

    def delete(self) -> None:
        """Frees the memory once dispatched programs are done with it.

        Arrays donated to a call that was interrupted are deleted already.
        """
        for leaf in jax.tree.leaves(self.pages):
            if not leaf.is_deleted():
                jax.block_until_ready(leaf)
                leaf.delete()


class _Running(NamedTuple):
    burst: Burst
    output: BurstOutput  # on the devices


class Digest(NamedTuple):
    """A burst with checksums of all its inputs, which processes compare with each other."""

    shape: Shape
    max_steps: int
    threshold: int
    is_ahead: bool
    rows: int  # checksum of the rows, their lengths and pages, and the reserved pages
    accept_prob: int  # checksum of `Burst.accept_prob`
    drafts: int  # checksum of the texts to draft from, or of a draft model's cached lengths


class DeviceExecutor(Executor):
    """Executes the scheduler's orders on devices, in one layout at a time: that of the weights."""

    def __init__(
        self,
        specs: ProgramSpecs,
        programs: ProgramTable,
        weights: Weights,
        responses: Responses,
        tables: BlockTables,
        clock: Stopwatch,
        *,
        draft_params: Any = None,
        checks: bool = False,
        earlier: EarlierResponses | None = None,
    ):
        """
        Args:
          draft_params: the drafter's weights.
          checks: compare every burst with that of the other processes.
          earlier: responses of earlier epochs, which drafts may also be copied from.
        """
        self.clock = clock
        self._checks = checks
        self.specs = specs
        self.programs = programs
        self.weights = weights
        self.responses = responses
        self.tables = tables
        self.pool = DevicePool(specs, programs, weights.layout)
        self._running: deque[_Running] = deque()
        # The rows' state on the devices, and the version of the table that it was made from.
        self._rows: RowState | None = None
        self._version = -1
        self._seen: jax.Array | None = None  # `sampling.Seen`, of the same version as the rows
        # For the running bursts: the rows' page tables, with the number of reserved pages taken;
        # and the drafter's state.
        self._tables: tuple[jax.Array, jax.Array] | None = None
        self._drafting: Any = None
        rollout = Rollout(specs.draft_shapes, programs, draft_params, responses, earlier)
        self._feed = specs.drafter.feed(rollout)
        self._draft_params = draft_params

    def prefill(self, work: PrefillWork) -> int:
        if not len(work.spans.sequence) and not len(work.copies.replica):
            return 0
        sizes = self.specs.prefill_sizes
        room = 0
        routes = self.responses.routes
        routes.settle()  # samples of a prompt have one route through it
        calls = self.tables.prefills(work.spans, self.responses.tokens, sizes, self.specs.buckets)
        params = self.weights.params
        pool = self.pool
        for call, length, (tokens, start, rows) in calls:
            blocks = call.start.shape[1]
            program = self.programs[Key("prefill", pool.layout.split, blocks, length)]
            recorded = routes.recorded(call, self.specs.page_size)
            pool.pages, routed = program(params, pool.pages, tokens, start, rows, recorded)
            routes.computed(call, routed)
            room += tokens.size
        self.pool.copy(work.copies)
        self.pool.settle()
        return room

    def scrub(self, poisoned: Copies) -> None:
        self.pool.copy(poisoned)

    def launch(self, burst: Burst) -> None:
        if not burst.is_ahead:
            self._feed.prepare(burst.shape)
        if self._checks:
            process_group().compare("burst", self._digest(burst))
        if not burst.is_ahead:
            self._put_rows(burst)
        elif self.pool.layout.backend.waits:
            jax.block_until_ready(self._running[-1].output)
        before = self._drafting if burst.is_ahead else None
        drafting = self._feed.state(self.pool.layout, burst.shape, before)
        assert self._rows is not None and self._seen is not None and self._tables is not None
        tables, drawn = self._tables
        state = DecodeState(self._rows, self._seen, self.pool.pages, tables, drawn, drafting)
        has_drafts = burst.shape.num_draft_tokens > 0
        is_copied = has_drafts and not self.specs.drafts.is_generated
        accept_prob = burst.accept_prob if is_copied else None
        if accept_prob is not None:
            accept_prob = accept_prob.astype(np.float32)
        until = Until(np.int32(burst.max_steps), np.int32(burst.threshold), accept_prob)
        own_params = self._draft_params if has_drafts else None
        program = self.programs[decode_key(burst.shape)]
        state, output = program(self.weights.params, state, burst.reserved, until, own_params)
        self._rows = state.rows
        self._seen = state.seen
        self.pool.pages = state.pool
        self._tables = (state.tables, state.drawn)
        self._drafting = state.drafting
        self._feed.keep(state.drafting)
        self._running.append(_Running(burst, output))

    def _put_rows(self, burst: Burst) -> None:
        layout = self.pool.layout
        table = self.responses.table
        if self._rows is None or self._seen is None or self._version != table.version:
            self._rows = layout.put(self.responses.row_state(), "batch")
            self._seen = self._put_seen()
            self._version = table.version
        tables = self.tables.rows(table.row_to_sequence, self.specs.width(burst.shape.length))
        none_drawn = np.zeros(layout.split.dp, np.int32)
        self._tables = layout.put((tables, none_drawn), "batch")

    def _digest(self, burst: Burst) -> Digest:
        table = self.responses.table
        reserved = burst.reserved
        pages = self.tables.rows(table.row_to_sequence, 1)
        known = table.row_to_sequence, table.length, table.end, pages
        return Digest(
            burst.shape,
            burst.max_steps,
            burst.threshold,
            burst.is_ahead,
            rows=_checksum((*known, reserved.pages, reserved.filled)),
            accept_prob=_checksum((burst.accept_prob,)),
            drafts=_checksum(self._feed.told),
        )

    def _put_seen(self) -> jax.Array:
        """The tokens that penalties apply to, on the devices. Nothing is sent if no running row
        has a penalty."""
        responses = self.responses
        layout = self.pool.layout
        rows = responses.table.num_replicas * responses.table.rows_per_replica
        shape = seen_shape(self.specs.functions.policy.config, rows)
        old = self._seen
        if (
            old is not None
            and not responses.has_penalties
            and (old.shape, old.sharding) == (shape, layout.sharding("batch"))
        ):
            return old
        return layout.put(responses.seen(shape), "batch")

    def collect(self) -> tuple[RowsOutput, bool]:
        burst, output = self._running.popleft()
        # If the burst was over before the host waited for it, its time is unknown.
        was_over = all(leaf.is_ready() for leaf in jax.tree.leaves(output))
        return jax.device_get(output), not (burst.is_ahead and was_over)

    def relocate(self, relocation: Relocation) -> Arrival:
        if relocation.source == relocation.target:
            return Arrival(None, self.pool.shift(relocation.moves))
        pages = self.specs.shapes.pages
        splits = (relocation.source, relocation.target)
        old, new = (Pools(split.dp, pages[split]) for split in splits)
        moves = relocation.moves
        arrivals = placed(moves, self.tables.holds(moves), old, new)
        target = self.specs.layouts[relocation.target]
        kv = self.pool.migrate(target, arrivals.shipments)
        weights, chunk = self.weights.reshard(target)
        sent = MovedBytes(weights + kv.total, weights + kv.least, kv.extra + chunk)
        return Arrival(arrivals.new_page, sent)

    def recompute(self, relocation: Relocation, work: PrefillWork, waits: np.ndarray) -> int:
        room = super().recompute(relocation, work, waits)
        self.pool.settle()
        return room

    def release(self) -> None:
        """Frees the pool and the drafter's arrays: the update that follows needs the memory."""
        self.pool.delete()
        self._feed.delete()


def _checksum(arrays: Iterable[Any]) -> int:
    return zlib.crc32(b"".join(np.asarray(x).tobytes() for x in arrays if x is not None))
