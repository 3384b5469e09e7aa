"""One decode step of a device's rows, which generates one token for each.

A step that verifies drafts (`verify_step.py`) shares its logits, sampling and update of rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int16, UInt32

from pat_jax.engine.device.decode.gumbel import WHOLE, has_whole_blocks
from pat_jax.engine.device.decode.sampling import Ahead, Seen, likeliest, remember, sample
from pat_jax.engine.device.ngram import put_windows
from pat_jax.engine.device.token_batch import Counts
from pat_jax.engine.sequences.page_allocator import num_pages_for
from pat_jax.engine.sequences.sequence_table import NO_TOKEN
from pat_jax.engine.sequences.state import BurstOutput, LayerPages, RowState
from pat_jax.engine.sequences.types import RowSampling
from pat_jax.layout.layout import Layout
from pat_jax.layout.partitions import ManualPartition
from pat_jax.models.cache.burst_layer import BurstLayer
from pat_jax.models.cache.draft_layer import DraftCopy, DraftPages, DraftRows, Line
from pat_jax.models.cache.paged_layer import NULL_PAGE, PagedLayer
from pat_jax.models.partition import Partition
from pat_jax.models.policy import Params, Policy

Cache = LayerPages | BurstLayer | DraftCopy


class Moving(NamedTuple):
    """The state that a decode step changes."""

    rows: RowState
    seen: Seen
    drafting: Any  # the drafter's state, see `DecodeState`
    counts: Counts  # of draft tokens
    caches: tuple[Cache, ...]
    output: BurstOutput


class Drawn(NamedTuple):
    """The sampled tokens: one for each row, or for each token that a step verifies."""

    tokens: Int[Array, "*each"]
    logprobs: Float[Array, "*each"]
    unfiltered: Float[Array, "*each"]
    top_tokens: Int[Array, "*each top"]
    top_logprobs: Float[Array, "*each top"]
    routed_experts: Int16[Array, "*each layers k"] | None  # experts of the token before this one


@dataclass(frozen=True)
class DecodeStep:
    """The decode step of one policy in one layout. Does not know when a burst ends."""

    policy: Policy
    layout: Layout
    dtype: jnp.dtype
    eos_ids: tuple[int, ...]
    max_logprobs: int

    @property
    def partition(self) -> Partition:
        return ManualPartition(self.layout)

    def plain(
        self,
        params: Params,
        keys: UInt32[Array, "tokens rows 2"],
        tables: Int[Array, "rows width"],
        moving: Moving,
    ) -> Moving:
        """Generates one token for each row, without drafts."""
        rows, seen, _, counts, caches, output = moving
        # The pages of a row that has ended may belong to another row by now.
        own = jnp.where(rows.running[:, None], tables, NULL_PAGE)
        logits, caches, routed = self.logits(
            params,
            jnp.where(rows.running, rows.last_token, NO_TOKEN)[:, None],
            rows.position[:, None],
            [x if isinstance(x, BurstLayer) else _paged(x, own) for x in caches],
        )
        with jax.named_scope("sample"):
            key = jax.lax.dynamic_index_in_dim(keys, output.steps, keepdims=False)
            endings = self.endings(rows)
            drawn = self.draw(
                logits[:, 0], routed[:, 0], key, rows.position, rows.sampling, seen, endings, None
            )
        # A NaN log-probability comes from NaN logits: the row stops, as all further tokens would
        # be wrong.
        failed = jnp.isnan(drawn.logprobs)
        stopped = jnp.any(drawn.tokens[:, None] == endings, axis=1) | failed
        after = advance(rows, drawn.tokens, stopped, failed)
        seen = remember(seen, drawn.tokens[:, None], rows.running[:, None])
        drawn = jax.tree.map(lambda x: x[:, None], drawn)
        return Moving(after, seen, None, counts, caches, noted(output, drawn, rows, after))

    def logits(
        self,
        params: Params,
        tokens: Int[Array, "rows length"],
        positions: Int[Array, "rows length"],
        caches: Sequence[PagedLayer | BurstLayer | DraftPages | DraftRows],
    ) -> tuple[
        Float[Array, "rows length vocab"],
        tuple[Cache, ...],
        Int16[Array, "rows length layers k"],
    ]:
        """Returns the device's logits, the caches with these tokens written, and the experts of
        each token."""
        model = self.policy.bind(params)
        hidden, written, routed = model(
            tokens, positions, tuple(caches), partition=self.partition, dtype=self.dtype
        )
        assert written is not None  # caches went in
        return model.logits(hidden), tuple(map(kept, written)), routed.experts

    def draw(
        self,
        logits: Float[Array, "rows vocab"],
        routed: Int16[Array, "rows layers k"] | None,
        keys: UInt32[Array, "rows 2"],
        position: Int[Array, " rows"],
        sampling: RowSampling,
        seen: Seen,
        endings: Int[Array, "rows endings"],
        ahead: Ahead | None,
        partition: Partition | None = None,
    ) -> Drawn:
        """Draws a token from each row of logits. `partition` splits their vocabulary, by default as
        the layout does. Logits are gathered if that splits a block."""
        partition = partition or self.partition
        if not has_whole_blocks(logits.shape[1], partition.num_shards("vocab")):
            logits = partition.gather(logits, "vocab")
            partition = WHOLE
        may_end = position + 1 >= sampling.may_end_at
        forbidden = jnp.where(may_end[:, None], NO_TOKEN, endings)
        vocab: Any = {"vocab_size": self.policy.config.vocab_size, "partition": partition}
        tokens, logprobs, unfiltered = sample(
            logits, keys, sampling, seen, forbidden, ahead, **vocab
        )
        top_tokens, top_logprobs = likeliest(
            logits, sampling.wants_top, count=self.max_logprobs, **vocab
        )
        return Drawn(tokens, logprobs, unfiltered, top_tokens, top_logprobs, routed)

    def endings(self, rows: RowState) -> Int[Array, "rows endings"]:
        """Returns the tokens that end each row's response, filled up with NO_TOKEN."""
        eos = jnp.asarray(self.eos_ids, jnp.int32)[None, :]
        eos = jnp.where(rows.ignore_eos[:, None], NO_TOKEN, eos)
        return jnp.concatenate([eos, rows.sampling.stop_ids], axis=1)


def _paged(cache: Cache, table: Int[Array, "rows width"]) -> PagedLayer:
    assert isinstance(cache, LayerPages), "a burst's caches are all of one kind"
    return PagedLayer(cache.keys, cache.values, table)


def views(
    caches: Sequence[Cache],
    tables: Int[Array, "rows width"],
    rows: RowState,
    line: Line,
    turns: int,
) -> tuple[DraftRows | DraftPages, ...]:
    """Returns the caches in the form that is read by a step that verifies the tokens of `line`.

    Page tables are widened by NULL_PAGE, so that `turns` tokens of a row near its end fit."""
    if isinstance(caches[0], DraftCopy):
        return tuple(DraftRows(x, line) for x in caches if isinstance(x, DraftCopy))
    own = jnp.where(rows.running[:, None], tables, NULL_PAGE)
    pages = [_paged(x, own) for x in caches]
    behind = num_pages_for(turns, pages[0].page_size)
    table = jnp.pad(own, ((0, 0), (0, behind)), constant_values=NULL_PAGE)
    return tuple(DraftPages(x.keys, x.values, table, line) for x in pages)


def kept(cache: PagedLayer | BurstLayer | DraftPages | DraftRows) -> Cache:
    """Returns the arrays of a cache that a burst's loop carries from step to step, without page
    tables and lines."""
    match cache:
        case DraftRows():
            return cache.copy
        case PagedLayer() | DraftPages():
            return LayerPages(cache.keys, cache.values)
    return cache


def advance(
    rows: RowState,
    tokens: Int[Array, " rows"],
    stopped: Bool[Array, " rows"],
    failed: Bool[Array, " rows"],
) -> RowState:
    """Returns the state of the rows after one more token each.

    Rows that are not running do not change: they are computed, but nothing reads the result. Rows
    that failed keep their position, so that no token drawn from NaN logits counts.
    """
    position = rows.position + (rows.running & ~failed)
    return replace(
        rows,
        last_token=jnp.where(rows.running, tokens, rows.last_token),
        position=position,
        running=rows.running & ~stopped & (position + 1 < rows.end),
    )


def noted(
    output: BurstOutput,
    drawn: Drawn,
    rows: RowState,
    after: RowState,
    num_generated: Int[Array, " rows"] | None = None,
) -> BurstOutput:
    """Returns the output with each row's new tokens.

    If `num_generated` is None, each row gets one token, in the step's column. Otherwise each gets
    that many tokens at its own offset; what is written behind them is overwritten later."""

    def put(name: str) -> Array:
        buffer, new = getattr(output, name), getattr(drawn, name)
        if num_generated is None:
            return jax.lax.dynamic_update_slice_in_dim(buffer, new, output.steps, axis=1)
        return put_windows(buffer, new, jnp.asarray(output.emitted))

    return replace(
        output,
        **{name: put(name) for name in Drawn._fields},
        emitted=output.emitted + (rows.running if num_generated is None else num_generated),
        running_steps=output.running_steps + rows.running,
        running=after.running,
        steps=output.steps + 1,
    )
