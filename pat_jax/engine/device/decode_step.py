"""One decode step of the rows of a device: a token each, or, with drafts, as many as are accepted.

A draft is verified by drawing every position's token with its own number, as without a draft, and going on
as long as the token drawn is the draft's. So what is said does not depend on what is drafted: a guess
only says which logits are worth computing ahead. For a guess that comes from texts this accepts as often
as rejection sampling does (arXiv 2211.17192, with a draft distribution of one token).
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pat_jax.engine.device.sampling import Seen, likeliest, remember, sample
from pat_jax.engine.device.suffix import Draft, append, find, put_windows
from pat_jax.engine.layout.layout import Layout, ManualPartition
from pat_jax.engine.sequences.page_allocator import num_pages_for
from pat_jax.engine.sequences.state import BurstOutput, LayerPages, RowState
from pat_jax.engine.sequences.types import NO_TOKEN
from pat_jax.models.burst_layer import BurstLayer
from pat_jax.models.draft_layer import DraftPages, DraftRows
from pat_jax.models.paged_layer import NULL_PAGE, PagedLayer
from pat_jax.models.policy import Params, Policy
from pat_jax.planning.drafts import MATCHES

Cache = LayerPages | BurstLayer | DraftRows


class Moving(NamedTuple):
    """What a step changes."""

    rows: RowState
    seen: Seen
    text: Int[Array, "rows columns"] | None  # see `suffix.py`; None where nothing is drafted
    caches: tuple[Cache, ...]
    output: BurstOutput


class _Drawn(NamedTuple):
    """Of each row, for each of its queries."""

    tokens: Int[Array, "rows queries"]
    logprobs: Float[Array, "rows queries"]
    unfiltered: Float[Array, "rows queries"]
    top_tokens: Int[Array, "rows queries top"]
    top_logprobs: Float[Array, "rows queries top"]


@dataclass(frozen=True)
class DecodeStep:
    """The step of one policy in one layout; knows nothing about when a burst ends."""

    policy: Policy
    layout: Layout
    dtype: jnp.dtype
    eos_ids: tuple[int, ...]
    max_logprobs: int
    draft: int  # most tokens that a step verifies besides the newest
    own: int = 0  # column of a text at which the row's own begins

    def __call__(
        self,
        params: Params,
        numbers: Float[Array, "tokens rows"],
        tables: Int[Array, "rows width"],
        moving: Moving,
    ) -> Moving:
        rows, seen, text, caches, output = moving
        tokens, draft = rows.last_token[:, None], None
        if text is not None:
            with jax.named_scope("draft"):
                draft = find(text, self.own + rows.position, most=self.draft)
            tokens = jnp.concatenate([tokens, jnp.maximum(draft.tokens, 0)], axis=1)
        positions = rows.position[:, None] + jnp.arange(tokens.shape[1])[None]
        model, partition = self.policy.bind(params), ManualPartition(self.layout)
        # What a row that has ended had may be another one's by now.
        own = jnp.where(rows.live[:, None], tables, NULL_PAGE)
        hidden, written = model(
            tokens,
            positions,
            tuple(_with_tables(cache, own, self.draft) for cache in caches),
            partition=partition,
            dtype=self.dtype,
        )
        assert written is not None  # caches went in
        logits = model.logits(hidden, partition)
        with jax.named_scope("sample"):
            endings = self._endings(rows)
            drawn = self._draw(logits, numbers, positions, rows, seen, draft, endings, output)
        # A log-probability that is no number has come from such logits: nothing good would follow.
        failed = jnp.isnan(drawn.logprobs)
        stopped = jnp.any(drawn.tokens[:, :, None] == endings[:, None], axis=2) | failed
        caches = tuple(map(_without_tables, written))
        if draft is None:
            after = _advance(rows, *(x[:, 0] for x in (drawn.tokens, stopped, failed)))
            seen = remember(seen, drawn.tokens, rows.live[:, None])
            return Moving(after, seen, None, caches, _noted(output, drawn, rows, after))
        with jax.named_scope("accept"):
            right = _agreeing(draft.tokens, drawn.tokens)
            said = _said(rows, right, stopped)
            after = _advance_by(rows, said, drawn.tokens, stopped, failed)
            is_said = jnp.arange(tokens.shape[1])[None] < said[:, None]
            seen = remember(seen, drawn.tokens, is_said)
            assert text is not None  # a draft came from it
            text = append(text, drawn.tokens, said, self.own + rows.position + 1)
            output = _noted(output, drawn, rows, after, said)
            output = replace(output, accepted=output.accepted + _counted(draft, right, rows.live))
        return Moving(after, seen, text, caches, output)

    def _draw(
        self,
        logits: Float[Array, "rows queries vocab"],
        numbers: Float[Array, "tokens rows"],
        positions: Int[Array, "rows queries"],
        rows: RowState,
        seen: Seen,
        draft: Draft | None,
        endings: Int[Array, "rows endings"],
        output: BurstOutput,
    ) -> _Drawn:
        """A token for each query, as if those before it in its row's draft had been said."""
        shape, vocab_size = positions.shape, self.policy.config.vocab_size
        logits = jnp.reshape(logits, (-1, logits.shape[-1]))
        sampling, said = rows.sampling, None
        if draft is None:
            number = jax.lax.dynamic_index_in_dim(numbers, output.steps, keepdims=False)
        else:
            at = output.emitted[None] + jnp.arange(shape[1])[:, None]
            number = jnp.ravel(jnp.take_along_axis(numbers, at, axis=0).T)
            sampling = jax.tree.map(lambda x: jnp.repeat(x, shape[1], axis=0), sampling)
            endings = jnp.repeat(endings, shape[1], axis=0)
            said = _before_each(draft.tokens)
        may_end = jnp.ravel(positions) + 1 >= sampling.may_end_at
        forbidden = jnp.where(may_end[:, None], NO_TOKEN, endings)
        tokens, logprobs, unfiltered = sample(
            logits, number, sampling, seen, forbidden, said, vocab_size=vocab_size
        )
        top = likeliest(logits, sampling.wants_top, count=self.max_logprobs, vocab_size=vocab_size)
        each = [jnp.reshape(x, shape) for x in (tokens, logprobs, unfiltered)]
        return _Drawn(*each, *(jnp.reshape(x, (*shape, -1)) for x in top))

    def _endings(self, rows: RowState) -> Int[Array, "rows endings"]:
        """The tokens that end each row's response, NO_TOKEN where there are fewer."""
        eos = jnp.asarray(self.eos_ids, jnp.int32)[None, :]
        eos = jnp.where(rows.ignore_eos[:, None], NO_TOKEN, eos)
        return jnp.concatenate([eos, rows.sampling.stop_ids], axis=1)


def _with_tables(
    cache: Cache, tables: Int[Array, "rows width"], draft: int
) -> PagedLayer | BurstLayer | DraftPages | DraftRows:
    if not isinstance(cache, LayerPages):
        return cache
    if not draft:
        return PagedLayer(*cache, tables)
    # As far as the last query of a row that is near its end.
    behind = (0, 0), (0, num_pages_for(draft, cache.keys.shape[2]))
    return DraftPages(*cache, jnp.pad(tables, behind, constant_values=NULL_PAGE))


def _without_tables(cache: PagedLayer | BurstLayer | DraftPages | DraftRows) -> Cache:
    """All layers have the same ones: a loop is to carry them once."""
    if isinstance(cache, PagedLayer | DraftPages):
        return LayerPages(cache.keys, cache.values)
    return cache


def _before_each(guesses: Int[Array, "rows draft"]) -> Int[Array, "rows*queries draft"]:
    """The guesses before each query of a row, NO_TOKEN in place of the others."""
    draft = guesses.shape[1]
    is_before = jnp.arange(draft)[None] < jnp.arange(draft + 1)[:, None]
    before = jnp.where(is_before[None], guesses[:, None], NO_TOKEN)
    return jnp.reshape(before, (-1, draft))


def _agreeing(
    guesses: Int[Array, "rows draft"], tokens: Int[Array, "rows queries"]
) -> Int[Array, " rows"]:
    """Guesses of each row, from its first, that are what was drawn."""
    return jnp.sum(jnp.cumprod(guesses == tokens[:, :-1], axis=1), axis=1, dtype=jnp.int32)


def _said(
    rows: RowState, right: Int[Array, " rows"], stopped: Bool[Array, "rows queries"]
) -> Int[Array, " rows"]:
    """Tokens that each row says: the right guesses and one more, or up to its end."""
    going_on = jnp.sum(jnp.cumprod(~stopped, axis=1), axis=1, dtype=jnp.int32)
    room = rows.end - 1 - rows.position
    return jnp.where(rows.live, jnp.minimum(jnp.minimum(right, going_on) + 1, room), 0)


def _counted(
    draft: Draft, right: Int[Array, " rows"], live: Bool[Array, " rows"]
) -> Int[Array, "1 matches queries"]:
    """Live rows by how long a match their draft had and how many of its tokens were right."""
    kind = jnp.sum(draft.matched[:, None] >= jnp.asarray(MATCHES)[None], axis=1)
    of_kind = (kind[:, None] == jnp.arange(len(MATCHES) + 1)[None]) & live[:, None]
    by_count = right[:, None] == jnp.arange(draft.tokens.shape[1] + 1)[None]
    counts = jnp.sum(of_kind[:, :, None] & by_count[:, None], axis=0, dtype=jnp.int32)
    return counts[None]


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


def _advance_by(
    rows: RowState,
    said: Int[Array, " rows"],
    tokens: Int[Array, "rows queries"],
    stopped: Bool[Array, "rows queries"],
    failed: Bool[Array, "rows queries"],
) -> RowState:
    """`_advance` by the first `said` tokens of each row, of which the last alone may have ended it."""
    last = jnp.maximum(said - 1, 0)[:, None]
    token, stops, fails = (
        jnp.take_along_axis(x, last, axis=1)[:, 0] for x in (tokens, stopped, failed)
    )
    before = replace(rows, position=rows.position + jnp.maximum(said - 1, 0))
    return _advance(before, token, stops, fails)


def _noted(
    output: BurstOutput,
    drawn: _Drawn,
    rows: RowState,
    after: RowState,
    said: Int[Array, " rows"] | None = None,
) -> BurstOutput:
    """With what each row has said: one token in the column of the step, or, of rows that say different
    numbers of them, `said` behind what it had. What lies behind that is written over."""

    def put(name: str) -> Array:
        buffer, new = getattr(output, name), getattr(drawn, name)
        if said is None:
            return jax.lax.dynamic_update_slice_in_dim(buffer, new, output.steps, axis=1)
        return put_windows(buffer, new, jnp.asarray(output.emitted))

    return replace(
        output,
        **{name: put(name) for name in _Drawn._fields},
        emitted=output.emitted + (rows.live if said is None else said),
        verified=output.verified + rows.live,
        live=after.live,
        steps=output.steps + 1,
    )
