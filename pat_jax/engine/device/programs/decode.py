"""The functions that run on the devices during generation, before compilation.

Each is written for one device's shard and wrapped in `shard_map`. So every collective in the
compiled program is written here or in the model. A decode step has two all-reduces per layer, one
for the embedding, and two small all-gathers that choose tokens over the shards of the vocabulary.
Logits are gathered only if a row has an option of sampling, or if shards split blocks of tokens.
Every `check_every` steps, a maximum over the replicas finds how many rows run in the fullest one,
and whether any lacks pages.
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
from pat_jax.engine.device.draft.drafter import Asked, Drafter
from pat_jax.engine.device.draft.drafters import NO_DRAFTER
from pat_jax.engine.device.programs.verify_step import verify
from pat_jax.engine.device.token_batch import Counts
from pat_jax.engine.sequences.page_allocator import num_pages_for
from pat_jax.engine.sequences.state import (
    BurstOutput,
    DecodeState,
    Drafting,
    LayerPages,
    Pool,
    ReservedPages,
    RowState,
    Runs,
    Until,
)
from pat_jax.layout.buckets import Drafts, Pace
from pat_jax.layout.layout import Layout
from pat_jax.layout.partitions import by_shard
from pat_jax.models.cache.burst_layer import BurstLayer
from pat_jax.models.cache.draft_layer import DraftCopy
from pat_jax.models.cache.paged_layer import KV_AXES, PagedLayer
from pat_jax.models.experts import ROUTE_DTYPE
from pat_jax.models.policy import Params, Policy
from pat_jax.planning.draft_counts import DraftResult

# The state that steps change, the rows' page tables, the number of reserved pages taken, and the
# values by which a burst tests whether it ends.
_Carry = tuple[Moving, Array, Array, Array]


@dataclass(frozen=True)
class _Loop:
    """The loop of a burst: it runs while enough rows are running and there are pages for them."""

    layout: Layout
    pace: Pace
    page_size: int
    ring: Int[Array, " size"]  # reserved pages of the replica, see `ReservedPages`
    filled: Int[Array, ""]  # pages reserved so far, see `ReservedPages`
    until: Until

    def run(
        self, step: Callable[[Array, Moving], Moving], moving: Moving, tables: Array, drawn: Array
    ) -> tuple[Moving, Array, Array]:
        """Runs steps until the burst ends, `check_every` steps between tests.

        `step` takes the rows' page tables and the state that it changes."""
        every = self.pace.check_every
        at_once = num_pages_for(self.pace.check_tokens, self.page_size)

        def keep_going(carry: _Carry) -> Array:
            moving, _, _, (running, is_short) = carry
            is_on = (running > self.until.threshold) & (moving.output.steps < self.until.steps)
            return is_on & (is_short == 0)

        def several_steps(carry: _Carry) -> _Carry:
            before, tables, drawn, _ = carry
            more = self._wanted(before.rows, tables)
            tables, drawn = draw(tables, more, self.ring, drawn, most=at_once)
            # A fixed trip count: only this outer loop has a condition for the host side to wait on.
            after = jax.lax.fori_loop(0, every, lambda _, x: step(tables, x), before)
            return after, tables, drawn, self._outlook(after.rows, tables, drawn)

        carry = moving, tables, drawn, self._outlook(moving.rows, tables, drawn)
        done, tables, drawn, _ = jax.lax.while_loop(keep_going, several_steps, carry)
        return done, tables, drawn

    def _wanted(self, rows: RowState, tables: Array) -> Int[Array, " rows"]:
        return lacking(rows, tables, steps=self.pace.check_tokens, page_size=self.page_size)

    def _outlook(self, rows: RowState, tables: Array, drawn: Array) -> Int[Array, "2"]:
        """Running rows of the fullest replica, and 1 if a replica lacks reserved pages, else 0."""
        is_short = jnp.sum(self._wanted(rows, tables)) > self.filled - drawn
        mine = jnp.stack([jnp.sum(rows.running, dtype=jnp.int32), is_short.astype(jnp.int32)])
        return jax.lax.pmax(mine, self.layout.dp_axes) if self.layout.dp_axes else mine


@dataclass(frozen=True)
class DecodeFunctions:
    """Builds the decode programs of one policy. Does not know when they run."""

    policy: Policy
    dtype: jnp.dtype
    eos_ids: tuple[int, ...]
    check_every: int
    burst_steps: int
    max_logprobs: int = 0  # most likeliest tokens that a request may ask for
    drafter: Drafter = NO_DRAFTER

    @property
    def drafts(self) -> Drafts:
        return self.drafter.drafts

    def burst(
        self, layout: Layout, num_draft_tokens: int = 0, drafting: Any = None
    ) -> Callable[
        [Params, DecodeState, ReservedPages, Until, Any], tuple[DecodeState, BurstOutput]
    ]:
        """Returns the function that decodes a burst.

        The burst ends as the argument `Until` says, or when a replica has too few reserved pages.
        Donate the state. The last argument is the drafter's weights, None if it has none.

        Args:
          num_draft_tokens: draft tokens per row and step.
          drafting: shapes of the drafter's state, None if it has none.
        """
        # A spec stands for all arrays below its place in the tree.
        rows: Any = layout.spec("batch")
        pool: Any = layout.spec(*KV_AXES)
        scalar: Any = layout.spec()
        drafted = jax.tree.map(lambda x: x.sharding.spec, drafting)
        state = DecodeState(rows, rows, pool, rows, rows, drafted)
        placement = scalar if layout.spans_processes else rows
        output: Any = dict.fromkeys((x.name for x in fields(BurstOutput)), placement)

        def run(*args: Any) -> tuple[DecodeState, BurstOutput]:
            return self._burst(layout, num_draft_tokens, *args)

        taken = layout.param_specs(self.policy), state, rows, scalar, scalar
        given = state, BurstOutput(**output | {"steps": scalar})
        return by_shard(layout, run, taken, given)

    def pace(self, num_draft_tokens: int) -> Pace:
        return Pace.of(self.check_every, self.burst_steps, self.drafts.draft(num_draft_tokens))

    def _burst(
        self,
        layout: Layout,
        num_draft_tokens: int,
        params: Params,
        state: DecodeState,
        reserved: ReservedPages,
        until: Until,
        own_params: Any,
    ) -> tuple[DecodeState, BurstOutput]:
        pace = self.pace(num_draft_tokens)
        rows = state.rows
        page_size = state.pool[0].keys.shape[2]
        most_pages = num_pages_for(pace.burst_tokens, page_size)
        output = self._nothing_generated(rows, pace, most_pages)
        (ring,), (filled,) = reserved.pages, reserved.filled  # one replica
        loop = _Loop(layout, pace, page_size, ring, filled, until)
        keys = _keys_ahead(rows, pace.burst_tokens)
        one = DecodeStep(self.policy, layout, self.dtype, self.eos_ids, self.max_logprobs)

        def step(tables: Array, moving: Moving) -> Moving:
            if not num_draft_tokens:
                return one.plain(params, keys, tables, moving)
            length = tables.shape[1] * page_size
            asked = Asked(
                one, params, own_params, keys, tables, until.accept_prob, length, num_draft_tokens
            )
            return verify(self.drafter, asked, moving)

        caches = self._begin(layout, state.pool, state.tables, rows.position, pace)
        moving = Moving(rows, state.seen, state.drafting, Counts.none(), caches, output)
        moving, tables, drawn = loop.run(step, moving, state.tables, state.drawn[0])
        rows, seen, drafting, counts, caches, output = moving
        runs = drafting.runs if isinstance(drafting, Drafting) else output.runs
        pages = added(tables, num_held(state.tables), most=most_pages)
        drafted = DraftResult(**counts._asdict())
        output = replace(output, pages=pages, runs=runs, drafted=drafted)
        pool = self._end(caches, state.pool, tables, state.rows.position, rows.position, pace)
        state = DecodeState(rows, seen, pool, tables, drawn[None], drafting)
        return state, _told(output, layout)

    def _nothing_generated(self, rows: RowState, pace: Pace, pages: int) -> BurstOutput:
        """The output before the first step. `pages` is the most that a row takes in a burst."""
        count = len(rows.position)

        def zeros(*shape: int, dtype: Any = jnp.int32) -> Array:
            return jnp.zeros(shape, dtype)

        shape = (count, pace.burst_tokens)
        top = self.max_logprobs
        return BurstOutput(
            tokens=zeros(*shape),
            logprobs=zeros(*shape, dtype=jnp.float32),
            unfiltered=zeros(*shape, dtype=jnp.float32),
            emitted=zeros(count),
            running=rows.running,
            steps=jnp.int32(0),
            top_tokens=zeros(*shape, top),
            top_logprobs=zeros(*shape, top, dtype=jnp.float32),
            pages=zeros(count, pages),
            running_steps=zeros(count),
            drafted=DraftResult(**Counts.none()._asdict()),
            runs=Runs(*[zeros(count)] * len(Runs._fields)),
            routed_experts=zeros(*shape, *self.policy.config.routes_shape, dtype=ROUTE_DTYPE),
        )

    def _begin(
        self,
        layout: Layout,
        pool: Pool,
        tables: Int[Array, "rows width"],
        start: Int[Array, " rows"],
        pace: Pace,
    ) -> tuple[Cache, ...]:
        """The caches to decode with: pages if a kernel reads them, else a contiguous copy."""
        if layout.backend.cache == "pages":
            return pool
        pages = [PagedLayer(layer.keys, layer.values, tables) for layer in pool]
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
            pages = PagedLayer(before.keys, before.values, tables)
            if isinstance(cache, BurstLayer):
                written = cache.end(pages, stop)
            else:
                written = cache.end(pages, start, stop, most=pace.burst_tokens)
            return LayerPages(written.keys, written.values)

        return tuple(map(end, caches, pool))


def _keys_ahead(rows: RowState, count: int) -> Array:
    """Sampling keys of all steps at once: step by step they cost more than the rest of sampling."""
    ahead = rows.position[None, :] + 1 + jnp.arange(count)[:, None]
    return jax.vmap(position_keys, in_axes=(None, 0))(rows.key, ahead)


def _told(output: BurstOutput, layout: Layout) -> BurstOutput:
    """Gathers the output of all replicas in every process: a host reads only its own devices."""
    if not (layout.spans_processes and layout.dp_axes):
        return output
    by_rows = [field.name for field in fields(output) if field.name != "steps"]
    gather = partial(jax.lax.all_gather, axis_name=layout.dp_axes, tiled=True)
    return replace(output, **{name: gather(getattr(output, name)) for name in by_rows})
