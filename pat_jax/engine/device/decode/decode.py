"""The functions that run on the devices during generation, before compilation.

Each is written for one device's shard and wrapped in `shard_map`, so that every collective in the
compiled program is written here or in the model. These are two sums a layer, one for the embedding,
one gather of the logits, and one sum every `check_every` steps: how many rows are live, and whether
there are pages for more.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pat_jax.engine.device.decode.decode_step import Cache, DecodeStep, Moving
from pat_jax.engine.device.decode.gumbel import position_keys
from pat_jax.engine.device.decode.page_append import added, draw, lacking, num_held
from pat_jax.engine.device.decode.verify_step import verify
from pat_jax.engine.device.draft.model_proposals import Asked, asking, exiting
from pat_jax.engine.device.draft.propose import Guess, copied
from pat_jax.engine.device.draft.token_batch import Counts
from pat_jax.engine.sequences.page_allocator import num_pages_for
from pat_jax.engine.sequences.state import (
    BurstOutput,
    DecodeState,
    Drafting,
    LayerPages,
    ModelDrafting,
    Pool,
    ReservedPages,
    RowState,
    Runs,
    Until,
    own_columns,
)
from pat_jax.layout.buckets import NO_DRAFTS, Drafts, Pace
from pat_jax.layout.layout import Layout, ManualPartition, whole_on_each
from pat_jax.models.cache.burst_layer import BurstLayer
from pat_jax.models.cache.draft_layer import DraftCopy
from pat_jax.models.cache.kv_cache import KV_AXES
from pat_jax.models.cache.paged_layer import PagedLayer
from pat_jax.models.policy import Params, Policy

Drafter = Any  # a head of the first layers, the weights of a draft model, or None

# Tables of the rows' pages, how many of the reserved ones are drawn, and what says whether to go on.
_Carry = tuple[Moving, Array, Array, Array]


@dataclass(frozen=True)
class DecodeFunctions:
    """Builds the programs of one policy; knows nothing about when they run."""

    policy: Policy
    dtype: jnp.dtype
    eos_ids: tuple[int, ...]
    check_every: int
    burst_steps: int
    max_logprobs: int = 0  # likeliest tokens that a request may ask for
    drafts: Drafts = NO_DRAFTS
    draft_policy: Policy | None = None  # of a draft model

    def burst(
        self, layout: Layout, budget: int = 0
    ) -> Callable[
        [Params, DecodeState, ReservedPages, Until, Drafter],
        tuple[DecodeState, BurstOutput],
    ]:
        """Decodes until `until`, or until a group has no reserved page left; rows draw pages from it as they grow.

        The state is to be donated.

        Args:
          budget: tokens of drafts that a step has room for, for each row; 0: the state has no texts.
            The last argument is the weights of who says drafts, None where nobody does.
        """
        # A spec stands for all arrays below its place in the tree.
        rows: Any = layout.spec("batch")
        pool: Any = layout.spec(*KV_AXES)
        scalar: Any = layout.spec()
        drafting = Drafting(rows, rows, rows) if budget and not self.drafts.is_said else None
        asked: Any = None
        if budget and self.draft_policy is not None:
            own: Any = whole_on_each(layout).spec(*KV_AXES)
            asked = ModelDrafting(own, rows, rows)
        state = DecodeState(rows, rows, pool, rows, rows, drafting, asked)
        said = scalar if layout.spans_processes else rows
        output: Any = dict.fromkeys((x.name for x in fields(BurstOutput)), said)
        return jax.shard_map(
            lambda *args: self._burst(layout, budget, *args),
            mesh=layout.mesh,
            in_specs=(layout.param_specs(self.policy), state, rows, scalar, scalar),
            out_specs=(state, BurstOutput(**output | {"steps": scalar})),
            check_vma=False,
        )

    def pace(self, budget: int) -> Pace:
        return Pace.of(self.check_every, self.burst_steps, self.drafts.draft(budget))

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
        budget: int,
        params: Params,
        state: DecodeState,
        reserved: ReservedPages,
        until: Until,
        drafter: Drafter,
    ) -> tuple[DecodeState, BurstOutput]:
        pace, page_size, start = (
            self.pace(budget),
            state.pool[0].keys.shape[2],
            state.rows.position,
        )
        most = num_pages_for(pace.burst_tokens, page_size)
        output = self._nothing_said(state.rows, pace, most)
        (ring,), (filled,) = reserved.pages, reserved.filled  # one group

        def wanted(rows: RowState, tables: Array) -> Int[Array, " rows"]:
            return lacking(rows, tables, steps=pace.check_tokens, page_size=page_size)

        def outlook(rows: RowState, tables: Array, drawn: Array) -> Int[Array, "2"]:
            """Live rows of the fullest group; 1 where some group has too few reserved pages, else 0."""
            is_short = jnp.sum(wanted(rows, tables)) > filled - drawn
            mine = jnp.stack([jnp.sum(rows.live, dtype=jnp.int32), is_short.astype(jnp.int32)])
            return jax.lax.pmax(mine, layout.dp_axes) if layout.dp_axes else mine

        def keep_going(carry: _Carry) -> Array:
            moving, _, _, (live, is_short) = carry
            return (live > until.threshold) & (moving.output.steps < until.steps) & (is_short == 0)

        def several_steps(carry: _Carry) -> _Carry:
            before, tables, drawn, _ = carry
            more = wanted(before.rows, tables)
            at_once = num_pages_for(pace.check_tokens, page_size)
            tables, drawn = draw(tables, more, ring, drawn, most=at_once)
            # A fixed trip count: only this outer loop has a condition for the host side to wait on.
            after = jax.lax.fori_loop(
                0, pace.check_every, lambda _, x: step(keys, tables, x), before
            )
            return after, tables, drawn, outlook(after.rows, tables, drawn)

        # The keys of all steps at once: one by one they cost more than the rest of sampling.
        ahead = start[None, :] + 1 + jnp.arange(pace.burst_tokens)[:, None]
        keys = jax.vmap(position_keys, in_axes=(None, 0))(state.rows.key, ahead)
        tables, (drawn,) = state.tables, state.drawn
        step = self._step(layout, budget, params, state, until, drafter)
        caches = self._begin(layout, state.pool, tables, start, pace)
        carry = (
            Moving(
                state.rows, state.seen, state.drafting, state.asking, Counts.none(), caches, output
            ),
            tables,
            drawn,
            outlook(state.rows, tables, drawn),
        )
        held = num_held(tables)
        done, tables, drawn, _ = jax.lax.while_loop(keep_going, several_steps, carry)
        rows, seen, drafting, asked, counts, caches, output = done
        runs = output.runs if drafting is None else drafting.runs
        output = replace(
            output, pages=added(tables, held, most=most), runs=runs, **counts._asdict()
        )
        pool = self._end(caches, state.pool, tables, start, rows.position, pace)
        state = DecodeState(rows, seen, pool, tables, drawn[None], drafting, asked)
        return state, _told(output, layout)

    def _step(
        self,
        layout: Layout,
        budget: int,
        params: Params,
        state: DecodeState,
        until: Until,
        drafter: Drafter,
    ) -> Callable[[Array, Array, Moving], Moving]:
        """One step, from the keys of a burst's tokens, the rows' tables and what it changes."""
        step = DecodeStep(self.policy, layout, self.dtype, self.eos_ids, self.max_logprobs)
        if not budget:
            return partial(step.plain, params)
        drafts, room, own = self.drafts, len(state.rows.live) * (1 + budget), 0
        if state.drafting is not None:
            length = state.tables.shape[1] * state.pool[0].keys.shape[2]
            own = state.drafting.text.shape[1] - own_columns(length, drafts.longest)

        def guessed(keys: Array, tables: Array, moving: Moving) -> tuple[Guess, Moving]:
            if self.draft_policy is not None:
                asked = Asked(self.draft_policy, drafter, whole_on_each(layout))
                return asking(step, asked, keys, moving, count=budget)
            if moving.drafting is None:
                depth = drafts.exit_layer
                return exiting(
                    step, params, drafter, keys, tables, moving, depth=depth, count=budget
                )
            reach = jnp.asarray(until.reach)
            options = {"own": own, "longest": drafts.longest, "room": room}
            return copied(moving.rows, moving.drafting, reach, **options), moving

        def verifying(keys: Array, tables: Array, moving: Moving) -> Moving:
            with jax.named_scope("draft"):
                guess, moving = guessed(keys, tables, moving)
            return verify(step, params, keys, tables, guess, moving, room=room, own=own)

        return verifying

    def _nothing_said(self, rows: RowState, pace: Pace, pages: int) -> BurstOutput:
        """
        Args:
          pages: most that a row draws in a burst.
        """
        count = len(rows.position)

        def zeros(*shape: int, dtype: Any = jnp.int32) -> Array:
            return jnp.zeros(shape, dtype)

        said, top = (count, pace.burst_tokens), self.max_logprobs
        return BurstOutput(
            tokens=zeros(*said),
            logprobs=zeros(*said, dtype=jnp.float32),
            unfiltered=zeros(*said, dtype=jnp.float32),
            emitted=zeros(count),
            live=rows.live,
            steps=jnp.int32(0),
            top_tokens=zeros(*said, top),
            top_logprobs=zeros(*said, top, dtype=jnp.float32),
            pages=zeros(count, pages),
            live_steps=zeros(count),
            runs=Runs(*[zeros(count)] * len(Runs._fields)),
            **Counts.none()._asdict(),
        )

    def _begin(
        self,
        layout: Layout,
        pool: Pool,
        tables: Int[Array, "rows width"],
        start: Int[Array, " rows"],
        pace: Pace,
    ) -> tuple[Cache, ...]:
        """The caches to decode with: pages where a kernel reads them, else a copy in one piece."""
        if layout.backend.cache == "pages":
            return pool
        pages = [PagedLayer(*layer, tables) for layer in pool]
        if pace.draft:
            return tuple(DraftCopy.begin(layer, pace.step_tokens) for layer in pages)
        return tuple(BurstLayer.begin(layer, start, pace.burst_steps) for layer in pages)

    @staticmethod
    def _end(
        caches: tuple[Cache, ...],
        pool: Pool,
        tables: Int[Array, "rows width"],
        start: Int[Array, " rows"],
        stop: Int[Array, " rows"],
        pace: Pace,
    ) -> Pool:
        def end(cache: Cache, before: LayerPages) -> LayerPages:
            if isinstance(cache, LayerPages):
                return cache
            pages = PagedLayer(*before, tables)
            if isinstance(cache, BurstLayer):
                written = cache.end(pages, stop)
            else:
                written = cache.end(pages, start, stop, most=pace.burst_tokens)
            return LayerPages(written.keys, written.values)

        return tuple(map(end, caches, pool))


def _told(output: BurstOutput, layout: Layout) -> BurstOutput:
    """To every process what all groups have said: a host reads its own devices alone."""
    if not (layout.spans_processes and layout.dp_axes):
        return output
    by_rows = [field.name for field in fields(output) if field.name != "steps"]
    gather = partial(jax.lax.all_gather, axis_name=layout.dp_axes, tiled=True)
    return replace(output, **{name: gather(getattr(output, name)) for name in by_rows})


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
