"""Executes a rollout on devices: prefill, bursts dispatched one behind another, and the moves between.

Follows the host's accounts with device arrays. Decides nothing: `controller.py` does.
"""

import zlib
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from pat_jax.common.hosts.together import company
from pat_jax.common.stopwatch import Stopwatch
from pat_jax.engine.controller import Burst, Relocation
from pat_jax.engine.device.draft.draft_model import DraftCache, DraftModel
from pat_jax.engine.device.pages.device_pool import DevicePool
from pat_jax.engine.device.programs.program_specs import ProgramSpecs
from pat_jax.engine.device.programs.weights import Weights
from pat_jax.engine.executor import Arrival, Executor
from pat_jax.engine.relocation.order import Pools, placed
from pat_jax.engine.sequences.block_tables import BlockTables
from pat_jax.engine.sequences.contents import RowsOutput
from pat_jax.engine.sequences.earlier import EarlierResponses
from pat_jax.engine.sequences.prefill_calls import (
    Copies,
    PrefillCall,
    PrefillWork,
    prefill_calls,
)
from pat_jax.engine.sequences.responses import Responses
from pat_jax.engine.sequences.state import (
    BurstOutput,
    DecodeState,
    Drafting,
    ModelDrafting,
    RowState,
    Until,
    own_columns,
    seen_shape,
)
from pat_jax.engine.sequences.texts import texts
from pat_jax.layout.buckets import Shape
from pat_jax.programs.programs import Key, ProgramTable


class _Running(NamedTuple):
    burst: Burst
    output: BurstOutput  # on the devices


class Digest(NamedTuple):
    """A burst, and checksums of all that the host tells the devices of it: what processes compare."""

    shape: Shape
    max_steps: int
    threshold: int
    is_ahead: bool
    rows: int
    reach: int
    texts: int  # that rows draft from, and the runs that go on; those of a burst ahead are the devices'
    draft_model: int  # what its cache holds


class DeviceExecutor(Executor):
    """Runs programs of one layout at a time: the one in which the weights are."""

    def __init__(
        self,
        specs: ProgramSpecs,
        programs: ProgramTable,
        weights: Weights,
        responses: Responses,
        tables: BlockTables,
        clock: Stopwatch,
        *,
        draft_model: DraftModel | None = None,
        checks: bool = False,
        earlier: EarlierResponses | None = None,
    ):
        """
        Args:
          checks: compare every burst with those of the other processes.
          earlier: what rows draft from as well.
        """
        self.clock, self._checks = clock, checks
        self.specs, self.programs, self.weights = specs, programs, weights
        self.responses, self.tables, self.earlier = responses, tables, earlier
        self.pool = DevicePool(specs, programs, weights.layout)
        self._running: deque[_Running] = deque()
        # What the devices have of the rows, and the table's version that it was made under.
        self._rows: RowState | None = None
        self._version = -1
        self._seen: jax.Array | None = None  # as old as the rows
        # Of the bursts on their way: the rows' pages, how many have been drawn, and what drafts come from.
        self._tables: tuple[jax.Array, jax.Array] | None = None
        self._drafting: Drafting | None = None
        self._asking: ModelDrafting | None = None
        self._draft_cache = draft_model and DraftCache(draft_model, programs, responses)
        self._drafter = draft_model.params if draft_model else weights.exit_head

    def prefill(self, work: PrefillWork) -> int:
        if not len(work.spans.sequence) and not len(work.copies.group):
            return 0
        specs, size, room = self.specs, self.specs.page_size, 0
        for call in prefill_calls(
            work.spans,
            num_groups=self.weights.layout.split.dp,
            sizes=specs.prefill_sizes,
            page_size=size,
        ):
            self._prefill(call)
            room += call.length.size * size
        self.pool.copy(work.copies)
        self.pool.settle()
        return room

    def _prefill(self, call: PrefillCall) -> None:
        specs, size = self.specs, self.specs.page_size
        length = specs.shapes.buckets.length_for(call.context)
        sequence, start = call.sequence.reshape(-1), call.start.reshape(-1)
        tokens = call.tokens(self.responses.tokens, size)
        tables = self.tables.rows(sequence, specs.width(length))
        self.pool.prefill(self.weights.params, tokens, start, tables, length)

    def wipe(self, spoilt: Copies) -> None:
        self.pool.copy(spoilt)

    def launch(self, burst: Burst) -> None:
        layout, table = self.pool.layout, self.responses.table
        drafting = None if burst.is_ahead else self._new_drafting(burst)
        if self._checks:
            company().compare("burst", self._digest(burst, drafting))
        if not burst.is_ahead:
            if self._rows is None or self._seen is None or self._version != table.version:
                self._rows = layout.put(self.responses.row_state(), "batch")
                self._seen, self._version = self._put_seen(), table.version
            tables = self.tables.rows(table.occupants, self.specs.width(burst.shape.length))
            none_drawn = np.zeros(layout.split.dp, np.int32)
            self._tables = layout.put((tables, none_drawn), "batch")
            put = layout.put(drafting, "batch")
            self._drafting = None if put is None else Drafting(*put)
        elif layout.backend.waits:
            jax.block_until_ready(self._running[-1].output)
        self._asking = self._put_asking(burst)
        assert self._rows is not None and self._seen is not None and self._tables is not None
        state = DecodeState(
            self._rows, self._seen, self.pool.pages, *self._tables, self._drafting, self._asking
        )
        split, rows, length, budget = burst.shape
        is_copied = self._drafting is not None
        reach = burst.reach.astype(np.float32) if is_copied and burst.reach is not None else None
        until = Until(np.int32(burst.max_steps), np.int32(burst.threshold), reach)
        drafter = self._drafter if budget else None
        program = self.programs[Key("decode", split, rows, length, budget=budget)]
        state, output = program(self.weights.params, state, burst.reserved, until, drafter)
        self._rows, self._seen, self.pool.pages = state.rows, state.seen, state.pool
        self._tables, self._drafting = (state.tables, state.drawn), state.drafting
        self._asking = state.asking
        if self._draft_cache and state.asking:
            self._draft_cache.keep(state.asking)
        self._running.append(_Running(burst, output))

    def _digest(self, burst: Burst, drafting: tuple[Any, ...] | None) -> Digest:
        table, reserved = self.responses.table, burst.reserved
        known = table.occupants, table.length, table.end, self.tables.rows(table.occupants, 1)
        rows = *known, reserved.pages, reserved.filled
        cache = self._draft_cache
        told = rows, (burst.reach,), jax.tree.leaves(drafting), (cache and cache.known,)
        return Digest(
            burst.shape, burst.max_steps, burst.threshold, burst.is_ahead, *map(_checksum, told)
        )

    def _new_drafting(self, burst: Burst) -> tuple[Any, ...] | None:
        """A `Drafting` on the host; None where rows do not copy drafts."""
        specs = self.specs
        if not burst.shape.budget or specs.drafts.is_said:
            return None
        length = specs.width(burst.shape.length) * specs.page_size
        own = own_columns(length, specs.drafts.longest)
        room = specs.text_room(burst.shape.length)
        text, borders = texts(self.responses, room, own, self.earlier)
        return text, self.responses.runs_of_rows(), borders

    def _put_asking(self, burst: Burst) -> ModelDrafting | None:
        """None where no draft model says drafts."""
        if not self._draft_cache:
            return None
        if not burst.shape.budget:
            self._draft_cache.pause()
            return None
        asked = self.pool.layout, burst.shape.length, self.specs.shapes.asked_ahead
        if burst.is_ahead and self._asking:
            return self._draft_cache.ready_behind(self._asking, *asked)
        return self._draft_cache.ready(*asked)

    def _put_seen(self) -> jax.Array:
        """What penalties look at. Where no live row has one any content will do: nothing is sent."""
        responses, layout = self.responses, self.pool.layout
        rows = responses.table.num_groups * responses.table.rows_per_group
        shape, old = seen_shape(self.specs.functions.policy.config, rows), self._seen
        if (
            old is not None
            and not responses.has_penalties
            and (old.shape, old.sharding) == (shape, layout.sharding("batch"))
        ):
            return old
        return layout.put(responses.seen(shape), "batch")

    def collect(self) -> tuple[RowsOutput, bool]:
        burst, output = self._running.popleft()
        # One that was over before the host came to wait for it took nobody knows how long.
        was_over = all(leaf.is_ready() for leaf in jax.tree.leaves(output))
        return jax.device_get(output), not (burst.is_ahead and was_over)

    def relocate(self, relocation: Relocation) -> Arrival:
        if relocation.source == relocation.target:
            traffic = self.pool.shift(relocation.moves)
            return Arrival(None, traffic.num_bytes, traffic.least_bytes, traffic.staging_bytes)
        pages, splits = self.specs.shapes.pages, (relocation.source, relocation.target)
        old, new = (Pools(split.dp, pages[split]) for split in splits)
        moves = relocation.moves
        arrivals = placed(moves, self.tables.holds(moves), old, new)
        target = self.specs.layouts[relocation.target]
        traffic = self.pool.migrate(target, arrivals.shipments)
        weight_bytes, chunk_bytes = self.weights.reslice(target)
        return Arrival(
            arrivals.new_page,
            weight_bytes + traffic.num_bytes,
            weight_bytes + traffic.least_bytes,
            traffic.staging_bytes + chunk_bytes,
        )

    def recompute(self, relocation: Relocation, work: PrefillWork, waits: np.ndarray) -> int:
        room = super().recompute(relocation, work, waits)
        self.pool.settle()
        return room

    def release(self) -> None:
        """The update that follows needs the memory."""
        self.pool.delete()
        if self._draft_cache:
            self._draft_cache.delete()


def _checksum(arrays: Iterable[Any]) -> int:
    """Of those that are there."""
    return zlib.crc32(b"".join(np.asarray(x).tobytes() for x in arrays if x is not None))
