"""A draft model: its weights, its cache, and how it catches up with new tokens.

Every device has all weights of the draft model, in every layout. For a small model, reading them is
faster than two all-reduces per layer. So a switch moves nothing of the draft model.

After bursts without drafts, switches and preemptions, its KV cache lacks tokens. These are computed
before the next burst with drafts. For a small model that is cheaper than computing every token of
large batches whose drafts would not pay.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pat_jax.common.pytree import with_sharding
from pat_jax.engine.device.decode.decode_step import Moving, kept, views
from pat_jax.engine.device.decode.prefill import prefill
from pat_jax.engine.device.decode.sampling import NEG_INF
from pat_jax.engine.device.draft.drafter import (
    Accepted,
    Asked,
    Drafter,
    DraftFeed,
    DraftShapes,
    Proposal,
    Rollout,
)
from pat_jax.engine.device.draft.generated import counted, generated
from pat_jax.engine.device.token_batch import Counts
from pat_jax.engine.sequences.block_tables import BlockTables
from pat_jax.engine.sequences.prefill_calls import Spans
from pat_jax.engine.sequences.state import (
    ModelDrafting,
    Pool,
    abstract_index,
    abstract_pool,
    abstract_routes,
    no_routes,
)
from pat_jax.layout.buckets import Shape
from pat_jax.layout.layout import Layout, whole_on_each
from pat_jax.layout.partitions import ManualPartition
from pat_jax.models.cache.draft_layer import Line
from pat_jax.models.cache.paged_layer import KV_AXES
from pat_jax.models.policy import Params, Policy
from pat_jax.planning.types import Split
from pat_jax.programs.programs import Key, ProgramTable

Load = Callable[[Params, jnp.dtype], Params]  # loads weights onto shardings, in a data type


def whole_params(policy: Policy, layout: Layout, dtype: jnp.dtype) -> Params:
    """Returns shapes of the weights with shardings that put all of them on every device."""
    return with_sharding(policy.abstract(dtype), layout.sharding())


@dataclass(frozen=True)
class ModelDrafter(Drafter):
    """Proposes drafts with a draft model, which has a KV cache of its own."""

    load_params: Load | None = None  # None if bursts are only compiled

    @property
    def model(self) -> Policy:
        assert self.policy is not None, "a draft model"
        return self.policy

    def propose(self, asked: Asked, moving: Moving) -> tuple[Proposal, Moving]:
        """Proposes one token per pass of the model.

        Each pass takes a row's newest token and the one before it: the last token of a fully
        accepted draft has not been in a pass. A token beyond the model's vocabulary embeds to zeros
        (`Transformer._embed`).
        """
        step, rows = asked.step, moving.rows
        drafting = moving.drafting
        row = jnp.arange(len(rows.running))
        partition = ManualPartition(whole_on_each(step.layout))

        def pass_(recent: tuple[Array, Array], position: Array, caches: tuple) -> tuple:
            line = two_each(rows.running, position)
            tokens = jnp.stack(recent, axis=1)
            tokens = jnp.where((position == 0)[:, None], tokens[:, 1:], tokens)
            model = self.model.bind(asked.own_params)
            hidden, written, _ = model(
                jnp.reshape(tokens, (1, -1)),
                line.slots[None],
                views(caches, drafting.tables, rows, line, 1 + asked.num_draft_tokens),
                partition=partition,
                dtype=step.dtype,
            )
            assert written is not None  # caches went in
            newest = jnp.reshape(hidden, (len(row), 2, -1))[row, position - line.start]
            known = self.model.config.vocab_size
            logits = model.logits(newest)[:, :known]
            of_policy = step.policy.config.padded_vocab_size
            return of_size(logits, of_policy), tuple(map(kept, written))

        proposal, written = generated(
            asked, moving, drafting.previous, pass_, drafting.pool, partition
        )
        return proposal, moving._replace(drafting=drafting._replace(pool=written))

    def catch_up(
        self, asked: Asked, moving: Moving, proposal: Proposal, accepted: Accepted
    ) -> tuple[ModelDrafting, Counts]:
        del asked
        counts = counted(moving, proposal, accepted)
        count = accepted.count
        before = jnp.concatenate([moving.rows.last_token[:, None], accepted.tokens], axis=1)
        before = jnp.take_along_axis(before, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
        previous = jnp.where(count > 0, before, moving.drafting.previous)
        return moving.drafting._replace(previous=previous), counts

    def params(self, layout: Layout, shapes: DraftShapes) -> Params:
        return whole_params(self.model, layout, shapes.dtype)

    def load(self, layout: Layout, shapes: DraftShapes) -> Params | None:
        assert self.load_params is not None, "a model that rollouts draft with"
        shardings = jax.tree.map(lambda x: x.sharding, self.params(layout, shapes))
        return self.load_params(shardings, shapes.dtype)

    def pages(self, split: Split, shapes: DraftShapes) -> int:
        """Returns the pages per replica of the draft model's KV cache."""
        return shapes.buckets.draft_pages(split, self.drafts, shapes.page_size)

    def pool(self, layout: Layout, shapes: DraftShapes) -> Pool:
        pages = self.pages(layout.split, shapes)
        own = whole_on_each(layout)
        return abstract_pool(self.model.config, own, pages, shapes.page_size, shapes.dtype)

    def state(self, layout: Layout, rows: int, length: int, shapes: DraftShapes) -> ModelDrafting:
        tables = abstract_index(layout, rows, shapes.width(length))
        return ModelDrafting(self.pool(layout, shapes), tables, abstract_index(layout, rows))

    def blank(self, zeros: ModelDrafting, num_replicas: int) -> ModelDrafting:
        """Returns a state in which no two rows share a page, as far as the pool has enough."""
        pages = len(zeros.pool[0].keys) // num_replicas
        tables = jnp.arange(zeros.tables.size, dtype=jnp.int32) % (pages - 1) + 1
        return zeros._replace(tables=jnp.reshape(tables, zeros.tables.shape))

    def declare(self, table: ProgramTable, layout: Layout, shapes: DraftShapes) -> None:
        pool = self.pool(layout, shapes)
        own = whole_on_each(layout)
        table.declare(
            Key("draft_allocate", layout.split),
            lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), pool),
            out_shardings=own.sharding(*KV_AXES),
        )
        blocks = shapes.prefill_blocks
        for length in shapes.buckets.compiled:
            table.declare(
                Key("draft_prefill", layout.split, blocks, length),
                prefill(self.model, own, shapes.dtype),
                self.params(layout, shapes),
                pool,
                abstract_index(layout, blocks, shapes.page_size),
                abstract_index(layout, blocks),
                abstract_index(layout, blocks, shapes.width(length)),
                abstract_routes(layout, blocks, shapes.page_size, self.model.config),
                donate_argnums=1,
            )

    def feed(self, rollout: Rollout) -> DraftFeed:
        return DraftCache(self, rollout)


def two_each(running: Bool[Array, " rows"], position: Int[Array, " rows"]) -> Line:
    """Returns a line of two tokens per row: at `position` and before it, or at 0 and 1."""
    row = jnp.repeat(jnp.arange(len(running)), 2)
    turn = jnp.tile(jnp.arange(2), len(running))
    place = jnp.reshape(jnp.arange(2 * len(running)), (-1, 2))
    return Line(row, jnp.repeat(running, 2), turn, place, jnp.maximum(position - 1, 0))


def of_size(logits: Float[Array, "rows vocab"], size: int) -> Float[Array, "rows size"]:
    """Returns a draft model's logits at the policy's vocabulary size; padding is never drawn."""
    more = max(0, size - logits.shape[1])
    return jnp.pad(logits[:, :size], ((0, 0), (0, more)), constant_values=NEG_INF)


class DraftCache(DraftFeed):
    """The draft model's cache of one rollout."""

    def __init__(self, drafter: ModelDrafter, rollout: Rollout):
        self.drafter = drafter
        self.shapes = rollout.shapes
        self.params = rollout.params
        self.programs = rollout.programs
        self.responses = rollout.responses
        self._split: Split | None = None  # the layout of the pool
        self._pool: Pool = ()
        self._tables: BlockTables | None = None
        # For each sequence, how many of its tokens are in the cache.
        self.known = np.zeros(len(self.responses.table), np.int64)
        self._drafting = np.zeros(0, np.int64)  # sequences with drafts since the last `state`

    @property
    def told(self) -> tuple[np.ndarray, ...]:
        return (self.known,)

    def state(self, layout: Layout, shape: Shape, before: Any) -> Any:
        """Returns the drafter's state for a burst.

        The cache then has all tokens of the running rows but the newest, and pages for what two
        bursts may generate. A burst dispatched behind another gets `before`, with more pages."""
        if before is not None:
            return self._with_pages(before, layout, shape.length)
        self.pause()
        if not shape.num_draft_tokens:
            return None
        if layout.split != self._split:
            self._begin(layout)
        self._give_pages()
        self._catch_up(layout)
        table = self.responses.table
        previous = np.zeros(len(table.row_to_sequence), np.int32)
        for i in table.running.tolist():
            known = self.responses.known(i)
            previous[table.row[i]] = known[max(0, len(known) - 2)]
        self._drafting = table.running
        tables = self._put_tables(layout, shape.length)
        return ModelDrafting(self._pool, tables, layout.put(previous, "batch"))

    def _with_pages(self, before: ModelDrafting, layout: Layout, length: int) -> ModelDrafting:
        if not self.tables.lacking(self.shapes.ahead).any():
            return before
        self.tables.extend(self.shapes.ahead)
        return before._replace(tables=self._put_tables(layout, length))

    def _put_tables(self, layout: Layout, length: int) -> jax.Array:
        rows = self.responses.table.row_to_sequence
        return layout.put(self.tables.rows(rows, self.shapes.width(length)), "batch")

    @property
    def tables(self) -> BlockTables:
        assert self._tables is not None, "begun"
        return self._tables

    def keep(self, state: Any) -> None:
        """Keeps the draft model's pool from a burst's final state for the next burst."""
        if state is not None:
            self._pool = state.pool

    def pause(self) -> None:
        """Notes how many tokens of each sequence are in the cache, after bursts with drafts.

        The last token of a fully accepted draft may be missing in the cache."""
        known = self.responses.table.length[self._drafting] - 2
        self.known[self._drafting] = np.maximum(known, 0)
        self._drafting = np.zeros(0, np.int64)

    def _begin(self, layout: Layout) -> None:
        self.delete()
        self._split = layout.split
        self.known[:] = 0
        self._pool = self.programs[Key("draft_allocate", layout.split)]()
        pages = self.drafter.pages(layout.split, self.shapes)
        size = self.shapes.page_size
        self._tables = BlockTables(self.responses.table, num_pages=pages, page_size=size)

    def _give_pages(self) -> None:
        table = self.responses.table
        running = table.running
        replica = table.replica(running)
        tables = self.tables
        is_here = np.zeros(len(table), bool)
        is_here[running[tables.replica[running] == replica]] = True
        gone = np.flatnonzero((tables.count > 0) & ~is_here)
        tables.release(gone)
        self.known[gone] = 0
        tables.replica[running] = replica
        tables.extend(self.shapes.ahead)

    def _catch_up(self, layout: Layout) -> None:
        table = self.responses.table
        shapes = self.shapes
        running = table.running
        behind = running[self.known[running] < table.length[running] - 1]
        start = self.known[behind] // shapes.page_size * shapes.page_size
        spans = Spans(behind, table.replica(behind), start, table.length[behind] - 1)
        sizes = shapes.prefill_blocks, shapes.prefill_blocks
        calls = self.tables.prefills(spans, self.responses.tokens, sizes, shapes.buckets)
        for call, length, (tokens, start, rows) in calls:
            blocks = call.start.shape[1]
            program = self.programs[Key("draft_prefill", layout.split, blocks, length)]
            recorded = no_routes(self.drafter.model.config, *tokens.shape)
            self._pool, _ = program(self.params, self._pool, tokens, start, rows, recorded)

    def delete(self) -> None:
        for leaf in jax.tree.leaves(self._pool):
            if not leaf.is_deleted():
                leaf.delete()
        self._pool, self._split = (), None
