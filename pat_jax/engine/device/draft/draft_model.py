"""A draft model's cache: which sequences have pages in it, and how it catches up with new tokens.

Bursts without drafts, switches and preemptions leave tokens out of it. These are computed before
the next burst with drafts. For a small model that is cheaper than to keep up with large batches
whose drafts would not pay.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pat_jax.engine.device.draft.draft_specs import DraftSpecs
from pat_jax.engine.sequences.block_tables import BlockTables
from pat_jax.engine.sequences.prefill_calls import Spans, prefill_calls
from pat_jax.engine.sequences.responses import Responses
from pat_jax.engine.sequences.state import ModelDrafting, Pool
from pat_jax.layout.layout import Layout
from pat_jax.models.policy import Params, Policy
from pat_jax.planning.types import Split
from pat_jax.programs.programs import Key, ProgramTable


@dataclass(frozen=True)
class DraftSource:
    """Where a draft model comes from."""

    policy: Policy
    load: Callable[[Params, jnp.dtype], Params]  # onto shards, in a type


@dataclass(frozen=True)
class DraftModel:
    """A handle: what is static of the model, and its weights on the devices."""

    specs: DraftSpecs
    params: Params


class DraftCache:
    """The draft model's cache of one rollout."""

    def __init__(self, model: DraftModel, programs: ProgramTable, responses: Responses):
        self.model, self.programs, self.responses = model, programs, responses
        self._split: Split | None = None  # in which the pool is
        self._pool: Pool = ()
        self._tables: BlockTables | None = None
        self.known = np.zeros(len(responses.table), np.int64)  # tokens of each sequence in it
        self._drafting = np.zeros(0, np.int64)  # sequences whose bursts have drafts, since `ready`

    def ready(self, layout: Layout, length: int, ahead: int) -> ModelDrafting:
        """What a burst of the live rows is handed; the model has seen all but their newest tokens.

        Args:
          length: bucket of the rows' tables.
          ahead: tokens of a row for which there is to be room; there are pages for them.
        """
        self.pause()
        if layout.split != self._split:
            self._begin(layout)
        self._give_pages(ahead)
        self._catch_up(layout)
        table = self.responses.table
        previous = np.zeros(len(table.occupants), np.int32)
        for i in table.live.tolist():
            known = self.responses.known(i)
            previous[table.row[i]] = known[max(0, len(known) - 2)]
        self._drafting = table.live
        before = layout.put(previous, "batch")
        return ModelDrafting(self._pool, self._put_tables(layout, length), before)

    def ready_behind(
        self, before: ModelDrafting, layout: Layout, length: int, ahead: int
    ) -> ModelDrafting:
        """What a burst is handed that is dispatched behind another of the same rows, of which nothing is
        known yet: `before`, and pages as far as both may come."""
        if not self.tables.lacking(ahead).any():
            return before
        self.tables.extend(ahead)
        return before._replace(tables=self._put_tables(layout, length))

    def _put_tables(self, layout: Layout, length: int) -> jax.Array:
        occupants, width = self.responses.table.occupants, self.model.specs.width(length)
        return layout.put(self.tables.rows(occupants, width), "batch")

    @property
    def tables(self) -> BlockTables:
        assert self._tables is not None, "begun"
        return self._tables

    def keep(self, drafting: ModelDrafting) -> None:
        """The pages as a burst has left them: of what is verified by it."""
        self._pool = drafting.pool

    def pause(self) -> None:
        """Bursts with drafts are over, and collected: what they have said is in the pages, but perhaps for
        the last token of a draft that was right to its end."""
        seen = self.responses.table.length[self._drafting] - 2
        self.known[self._drafting] = np.maximum(seen, 0)
        self._drafting = np.zeros(0, np.int64)

    def _begin(self, layout: Layout) -> None:
        self.delete()
        specs = self.model.specs
        self._split, self.known[:] = layout.split, 0
        self._pool = self.programs[Key("draft_allocate", layout.split)]()
        self._tables = BlockTables(
            self.responses.table, num_pages=specs.pages(layout.split), page_size=specs.page_size
        )

    def _give_pages(self, ahead: int) -> None:
        table, tables = self.responses.table, self.tables
        live, group = table.live, table.group(table.live)
        is_here = np.zeros(len(table), bool)
        is_here[live[tables.group[live] == group]] = True
        gone = np.flatnonzero((tables.count > 0) & ~is_here)
        tables.release(gone)
        self.known[gone] = 0
        tables.group[live] = group
        tables.extend(ahead)

    def _catch_up(self, layout: Layout) -> None:
        table, specs = self.responses.table, self.model.specs
        live, size = table.live, specs.page_size
        start = self.known[live] // size * size
        stop = table.length[live] - 1
        is_behind = self.known[live] < stop
        spans = Spans(*(x[is_behind] for x in (live, table.group(live), start, stop)))
        blocks = specs.prefill_blocks
        calls = prefill_calls(
            spans, num_groups=layout.split.dp, sizes=(blocks, blocks), page_size=size
        )
        for call in calls:
            length = specs.buckets.length_for(call.context)
            sequence, at = call.sequence.reshape(-1), call.start.reshape(-1)
            tokens = call.tokens(self.responses.tokens, size)
            tables = self.tables.rows(sequence, specs.width(length))
            program = self.programs[Key("draft_prefill", layout.split, blocks, length)]
            self._pool = program(self.model.params, self._pool, tokens, at, tables)

    def delete(self) -> None:
        for leaf in jax.tree.leaves(self._pool):
            if not leaf.is_deleted():
                leaf.delete()
        self._pool, self._split = (), None
