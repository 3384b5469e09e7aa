"""The functions that run on the devices during generation, before compilation.

Each is written for one device's shard and wrapped in `shard_map`, so that every collective in the
compiled program is one that is written here or in the model: two sums a layer, one for the
embedding, one gather of the logits, and once in `check_every` steps how many rows are live and
whether there are pages for more.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pat_jax.engine.device.page_append import added, draw, lacking, num_held
from pat_jax.engine.device.sampling import Seen, likeliest, remember, sample, uniform
from pat_jax.engine.layout.layout import Layout, ManualPartition
from pat_jax.engine.sequences.page_allocator import num_pages_for
from pat_jax.engine.sequences.state import (
    BurstOutput,
    DecodeState,
    LayerPages,
    Pool,
    ReservedPages,
    RowState,
    Until,
)
from pat_jax.engine.sequences.types import NO_TOKEN
from pat_jax.models.burst_layer import BurstLayer
from pat_jax.models.kv_cache import KV_AXES
from pat_jax.models.paged_layer import NULL_PAGE, PagedLayer
from pat_jax.models.policy import Params, Policy

Caches = tuple[LayerPages | BurstLayer, ...]
_Step = tuple[RowState, Seen, Caches, BurstOutput]
# Tables of the rows' pages, how many of the reserved ones are drawn, and what says whether to go on.
_Carry = tuple[_Step, Array, Array, Array]


@dataclass(frozen=True)
class DecodeFunctions:
    """Builds the programs of one policy; knows nothing about when they run."""

    policy: Policy
    dtype: jnp.dtype
    eos_ids: tuple[int, ...]
    check_every: int
    burst_steps: int
    max_logprobs: int = 0  # likeliest tokens that a request may ask for

    def burst(
        self, layout: Layout
    ) -> Callable[[Params, DecodeState, ReservedPages, Until], tuple[DecodeState, BurstOutput]]:
        """Decodes until `until`, or until a group has no reserved page left; rows draw pages from it as they grow.

        The state is to be donated.
        """
        # A spec stands for all arrays below its place in the tree.
        rows: Any = layout.spec("batch")
        pool: Any = layout.spec(*KV_AXES)
        scalar: Any = layout.spec()
        state = DecodeState(rows, rows, pool, rows, rows)
        said = scalar if layout.spans_processes else rows
        return jax.shard_map(
            lambda *args: self._burst(layout, *args),
            mesh=layout.mesh,
            in_specs=(layout.param_specs(self.policy), state, rows, scalar),
            out_specs=(state, BurstOutput(said, said, said, said, said, scalar, said, said, said)),
            check_vma=False,
        )

    def prefill(self, layout: Layout) -> Callable[[Params, Pool, Array, Array, Array], Pool]:
        """Computes pages of known tokens, `tokens[blocks, page_size]`, of any sequences of a group.

        Block i begins at position `start[i]`, a multiple of the page size, of the sequence whose pages
        are `tables[i]`. All blocks are in their pages before any of them attends: those of one
        sequence may be in the same call. A block of NULL_PAGE alone is empty. The pool is to be
        donated.
        """
        pool: Any = layout.spec(*KV_AXES)
        batch = layout.spec("batch")

        def run(params: Params, pool: Pool, tokens: Array, start: Array, tables: Array) -> Pool:
            positions = start[:, None] + jnp.arange(tokens.shape[1])[None, :]
            model, partition = self.policy.bind(params), ManualPartition(layout)
            caches = tuple(PagedLayer(*pages, tables) for pages in pool)
            _, written = model(tokens, positions, caches, partition=partition, dtype=self.dtype)
            assert written is not None  # caches went in
            return tuple(LayerPages(cache.keys, cache.values) for cache in written)

        return jax.shard_map(
            run,
            mesh=layout.mesh,
            in_specs=(layout.param_specs(self.policy), pool, batch, batch, batch),
            out_specs=pool,
            check_vma=False,
        )

    def _burst(
        self,
        layout: Layout,
        params: Params,
        state: DecodeState,
        reserved: ReservedPages,
        until: Until,
    ) -> tuple[DecodeState, BurstOutput]:
        page_size, steps = state.pool[0].keys.shape[2], self.check_every
        rows, most = state.rows.position.shape[0], num_pages_for(self.burst_steps, page_size)
        output = BurstOutput(
            tokens=jnp.zeros((rows, self.burst_steps), jnp.int32),
            logprobs=jnp.zeros((rows, self.burst_steps), jnp.float32),
            unfiltered=jnp.zeros((rows, self.burst_steps), jnp.float32),
            emitted=jnp.zeros(rows, jnp.int32),
            live=state.rows.live,
            steps=jnp.int32(0),
            top_tokens=jnp.zeros((rows, self.burst_steps, self.max_logprobs), jnp.int32),
            top_logprobs=jnp.zeros((rows, self.burst_steps, self.max_logprobs), jnp.float32),
            pages=jnp.zeros((rows, most), jnp.int32),
        )
        (ring,), (filled,) = reserved.pages, reserved.filled  # one group

        def wanted(rows: RowState, tables: Array) -> Int[Array, " rows"]:
            return lacking(rows, tables, steps=steps, page_size=page_size)

        def outlook(rows: RowState, tables: Array, drawn: Array) -> Int[Array, "2"]:
            """Live rows of the fullest group; 1 where some group has too few reserved pages, else 0."""
            is_short = jnp.sum(wanted(rows, tables)) > filled - drawn
            mine = jnp.stack([jnp.sum(rows.live, dtype=jnp.int32), is_short.astype(jnp.int32)])
            return jax.lax.pmax(mine, layout.dp_axes) if layout.dp_axes else mine

        def keep_going(carry: _Carry) -> Array:
            (*_, output), _, _, (live, is_short) = carry
            return (live > until.threshold) & (output.steps < until.steps) & (is_short == 0)

        def several_steps(carry: _Carry) -> _Carry:
            before, tables, drawn, _ = carry
            more = wanted(before[0], tables)
            tables, drawn = draw(tables, more, ring, drawn, most=num_pages_for(steps, page_size))
            # A fixed trip count: only this outer loop has a condition for the host side to wait on.
            after = jax.lax.fori_loop(
                0, steps, lambda _, c: self._step(layout, params, numbers, tables, *c), before
            )
            return after, tables, drawn, outlook(after[0], tables, drawn)

        # The numbers of all steps at once: one by one they cost more than the rest of sampling.
        ahead = state.rows.position[None, :] + 1 + jnp.arange(self.burst_steps)[:, None]
        numbers = jax.vmap(uniform, in_axes=(None, 0))(state.rows.key, ahead)
        tables, (drawn,) = state.tables, state.drawn
        held = num_held(tables)
        caches = self._begin(layout, state.pool, tables, state.rows.position)
        carry = (
            (state.rows, state.seen, caches, output),
            tables,
            drawn,
            outlook(state.rows, tables, drawn),
        )
        done, tables, drawn, _ = jax.lax.while_loop(keep_going, several_steps, carry)
        after, seen, caches, output = done
        output = _told(replace(output, pages=added(tables, held, most=most)), layout)
        pool = self._end(caches, state.pool, tables, after.position)
        return DecodeState(after, seen, pool, tables, drawn[None]), output

    def _begin(
        self,
        layout: Layout,
        pool: Pool,
        tables: Int[Array, "rows width"],
        start: Int[Array, " rows"],
    ) -> Caches:
        """The caches to decode with: pages where a kernel reads them, else a copy in one piece."""
        if layout.backend.cache == "copy":
            pages = (PagedLayer(*layer, tables) for layer in pool)
            return tuple(BurstLayer.begin(layer, start, self.burst_steps) for layer in pages)
        return pool

    @staticmethod
    def _end(
        caches: Caches, pool: Pool, tables: Int[Array, "rows width"], stop: Int[Array, " rows"]
    ) -> Pool:
        def end(cache: LayerPages | BurstLayer, before: LayerPages) -> LayerPages:
            if isinstance(cache, LayerPages):
                return cache
            written = cache.end(PagedLayer(*before, tables), stop)
            return LayerPages(written.keys, written.values)

        return tuple(map(end, caches, pool))

    def _step(
        self,
        layout: Layout,
        params: Params,
        numbers: Float[Array, "steps rows"],
        tables: Int[Array, "rows width"],
        rows: RowState,
        seen: Seen,
        caches: Caches,
        output: BurstOutput,
    ) -> _Step:
        model, partition = self.policy.bind(params), ManualPartition(layout)
        # What a row that has ended had may be another one's by now.
        own = jnp.where(rows.live[:, None], tables, NULL_PAGE)
        hidden, written = model(
            rows.last_token[:, None],
            rows.position[:, None],
            tuple(_with_tables(cache, own) for cache in caches),
            partition=partition,
            dtype=self.dtype,
        )
        assert written is not None  # caches went in
        logits = model.logits(hidden[:, 0], partition)
        with jax.named_scope("sample"):
            number = jax.lax.dynamic_index_in_dim(numbers, output.steps, keepdims=False)
            vocab_size, endings = self.policy.config.vocab_size, self._endings(rows)
            may_end = rows.position + 1 >= rows.sampling.may_end_at
            forbidden = jnp.where(may_end[:, None], NO_TOKEN, endings)
            drawn = sample(logits, number, rows.sampling, seen, forbidden, vocab_size=vocab_size)
            tokens, logprobs, unfiltered = drawn
            top_tokens, top_logprobs = likeliest(
                logits, rows.sampling.wants_top, count=self.max_logprobs, vocab_size=vocab_size
            )
        # A log-probability that is no number has come from such logits: nothing good would follow.
        failed = jnp.isnan(logprobs)
        stopped = jnp.any(tokens[:, None] == endings, axis=1) | failed
        after = _advance(rows, tokens, stopped, failed)
        output = replace(
            output,
            tokens=_put_column(output.tokens, tokens, output.steps),
            logprobs=_put_column(output.logprobs, logprobs, output.steps),
            unfiltered=_put_column(output.unfiltered, unfiltered, output.steps),
            emitted=output.emitted + rows.live,
            live=after.live,
            steps=output.steps + 1,
            top_tokens=_put_column(output.top_tokens, top_tokens, output.steps),
            top_logprobs=_put_column(output.top_logprobs, top_logprobs, output.steps),
        )
        seen = remember(seen, tokens, rows.live)
        return after, seen, tuple(map(_without_tables, written)), output

    def _endings(self, rows: RowState) -> Int[Array, "rows endings"]:
        """The tokens that end each row's response, NO_TOKEN where there are fewer."""
        eos = jnp.asarray(self.eos_ids, jnp.int32)[None, :]
        eos = jnp.where(rows.ignore_eos[:, None], NO_TOKEN, eos)
        return jnp.concatenate([eos, rows.sampling.stop_ids], axis=1)


def _with_tables(cache: LayerPages | BurstLayer, tables: Array) -> PagedLayer | BurstLayer:
    return cache if isinstance(cache, BurstLayer) else PagedLayer(*cache, tables)


def _without_tables(cache: PagedLayer | BurstLayer) -> LayerPages | BurstLayer:
    """All layers have the same ones: a loop is to carry them once."""
    return cache if isinstance(cache, BurstLayer) else LayerPages(cache.keys, cache.values)


def _told(output: BurstOutput, layout: Layout) -> BurstOutput:
    """To every process what all groups have said: a host reads its own devices alone."""
    if not (layout.spans_processes and layout.dp_axes):
        return output
    by_rows = [field.name for field in fields(output) if field.name != "steps"]
    gather = partial(jax.lax.all_gather, axis_name=layout.dp_axes, tiled=True)
    return replace(output, **{name: gather(getattr(output, name)) for name in by_rows})


def _put_column(buffer: Any, column: Array, at: Any) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(buffer, column[:, None], at, axis=1)


def _advance(
    rows: RowState,
    tokens: Int[Array, " rows"],
    stopped: Bool[Array, " rows"],
    failed: Bool[Array, " rows"],
) -> RowState:
    """Rows that are not live stand still: they decode, but nothing reads what comes of it.

    Those that failed do not go on to the token after, so that no NaN counts as one of theirs.
    """
    position = rows.position + (rows.live & ~failed)
    return replace(
        rows,
        last_token=jnp.where(rows.live, tokens, rows.last_token),
        position=position,
        live=rows.live & ~stopped & (position + 1 < rows.end),
    )


def copy_pages(layout: Layout) -> Callable[[Pool, Array, Array], Pool]:
    """Copies page `source[i]` of each group to its page `target[i]`; no page is both.

    Pairs of NULL_PAGE are empty. The pool is to be donated.
    """

    def run(pool: Pool, source: Int[Array, " pairs"], target: Int[Array, " pairs"]) -> Pool:
        # In turn, as in `pages.put`: XLA:CPU may copy the whole pool for a scatter.
        def in_turn(x: Array, source: Array, target: Array) -> Array:
            def copy(pair: Int[Array, ""], x: Array) -> Array:
                page = jax.lax.dynamic_index_in_dim(x, source[pair])
                return jax.lax.dynamic_update_slice(x, page, (target[pair], 0, 0, 0))

            return jax.lax.fori_loop(0, len(source), copy, x)

        def at_once(x: Array, source: Array, target: Array) -> Array:
            return x.at[target].set(x[source])

        return jax.tree.map(
            lambda x: jax.lax.platform_dependent(x, source, target, cpu=in_turn, default=at_once),
            pool,
        )

    pool, batch = layout.spec(*KV_AXES), layout.spec("batch")
    return jax.shard_map(
        run, mesh=layout.mesh, in_specs=(pool, batch, batch), out_specs=pool, check_vma=False
    )
