"""One decode step of the rows of a device: a token each, or, with drafts, as many as are accepted.

A draft is verified by drawing every position's token with its own number, as without a draft, and going on
as long as the token drawn is the draft's; of two that begin otherwise, along the one that the first token
drawn is of. So what is said does not depend on what is drafted: a guess
only says which logits are worth computing ahead. For a guess that comes from texts this accepts as often
as rejection sampling does (arXiv 2211.17192, with a draft distribution of one token).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pat_jax.engine.device.guess import Guess
from pat_jax.engine.device.lines import Counts, left_by, line_of, source_of
from pat_jax.engine.device.sampling import Ahead, Seen, likeliest, remember, sample
from pat_jax.engine.device.suffix import append, put_windows
from pat_jax.engine.layout.layout import Layout, ManualPartition
from pat_jax.engine.sequences.page_allocator import num_pages_for
from pat_jax.engine.sequences.state import (
    BurstOutput,
    Drafting,
    LayerPages,
    ModelDrafting,
    RowState,
    Runs,
)
from pat_jax.engine.sequences.types import NO_TOKEN, RowSampling
from pat_jax.models.burst_layer import BurstLayer
from pat_jax.models.draft_layer import DraftCopy, DraftPages, DraftRows, Line
from pat_jax.models.paged_layer import NULL_PAGE, PagedLayer
from pat_jax.models.policy import Params, Policy

Cache = LayerPages | BurstLayer | DraftCopy


class Moving(NamedTuple):
    """What a step changes."""

    rows: RowState
    seen: Seen
    drafting: Drafting | None  # where drafts are copied
    asking: ModelDrafting | None  # where a draft model says them
    counts: Counts  # of them
    caches: tuple[Cache, ...]
    output: BurstOutput


class _Drawn(NamedTuple):
    """Of each row, or of each token of a line."""

    tokens: Int[Array, "*each"]
    logprobs: Float[Array, "*each"]
    unfiltered: Float[Array, "*each"]
    top_tokens: Int[Array, "*each top"]
    top_logprobs: Float[Array, "*each top"]


@dataclass(frozen=True)
class DecodeStep:
    """The step of one policy in one layout; knows nothing about when a burst ends."""

    policy: Policy
    layout: Layout
    dtype: jnp.dtype
    eos_ids: tuple[int, ...]
    max_logprobs: int

    def plain(
        self,
        params: Params,
        numbers: Float[Array, "tokens rows"],
        tables: Int[Array, "rows width"],
        moving: Moving,
    ) -> Moving:
        """One token of each row."""
        rows, seen, _, asking, counts, caches, output = moving
        # What a row that has ended had may be another one's by now.
        own = jnp.where(rows.live[:, None], tables, NULL_PAGE)
        logits, caches = self._logits(
            params,
            rows.last_token[:, None],
            rows.position[:, None],
            [x if isinstance(x, BurstLayer) else PagedLayer(*_pages(x), own) for x in caches],
        )
        with jax.named_scope("sample"):
            number = jax.lax.dynamic_index_in_dim(numbers, output.steps, keepdims=False)
            endings = self.endings(rows)
            drawn = self._draw(
                logits[:, 0], number, rows.position, rows.sampling, seen, endings, None
            )
        # A log-probability that is no number has come from such logits: nothing good would follow.
        failed = jnp.isnan(drawn.logprobs)
        stopped = jnp.any(drawn.tokens[:, None] == endings, axis=1) | failed
        after = _advance(rows, drawn.tokens, stopped, failed)
        seen = remember(seen, drawn.tokens[:, None], rows.live[:, None])
        drawn = jax.tree.map(lambda x: x[:, None], drawn)
        return Moving(after, seen, None, asking, counts, caches, _noted(output, drawn, rows, after))

    def verifying(
        self,
        params: Params,
        numbers: Float[Array, "tokens rows"],
        tables: Int[Array, "rows width"],
        guess: Guess,
        moving: Moving,
        *,
        room: int,
        own: int,
    ) -> Moving:
        """As many tokens of each row as its draft gets right, and one more.

        Args:
          room: tokens of a line.
          own: column of a text at which the row's own begins.
        """
        rows, seen, _, _, _, caches, output = moving
        turns = 1 + guess.draft.tokens.shape[1]
        with jax.named_scope("draft"):
            of_branch = None if guess.branch is None else guess.branch[1]
            line = line_of(
                guess.length, rows.live, rows.position, of_branch, room=room, turns=turns
            )
            path = _paths(guess, line)
            before = jnp.maximum(line.depth - 1, 0)[:, None]
            known = jnp.take_along_axis(path, before, axis=1)[:, 0]
            known = jnp.where(line.depth > 0, known, rows.last_token[line.row])
            known = jnp.where(line.is_taken, known, 0)
        position = line.start[line.row] + line.depth
        seen_by = views(caches, tables, rows, line, turns)
        logits, caches = self._logits(params, known[None], position[None], seen_by)
        with jax.named_scope("sample"):
            number = numbers[output.emitted[line.row] + line.depth, line.row]
            sampling = jax.tree.map(lambda x: x[line.row], rows.sampling)
            endings = self.endings(rows)[line.row]
            is_before = jnp.arange(path.shape[1])[None] < line.depth[:, None]
            ahead = Ahead(line.row, jnp.where(is_before, path, NO_TOKEN))
            drawn = self._draw(logits[0], number, position, sampling, seen, endings, ahead)
            failed = jnp.isnan(drawn.logprobs)
            stopped = jnp.any(drawn.tokens[:, None] == endings, axis=1) | failed
        with jax.named_scope("accept"):
            taken = _is_branch_right(guess, drawn.tokens[line.place[:, 0]])
            place = line.place
            if guess.branch is not None:
                caches = on_branches(caches, tables, rows, line, turns, taken)
                behind = jnp.take_along_axis(place, 1 + line.moved(taken), axis=1)
                place = jnp.concatenate([place[:, :1], behind], axis=1)
            by_row = jax.tree.map(lambda x: x[place], (drawn, stopped, failed))
            return self._accept(moving, guess, taken, own, caches, *by_row)

    @staticmethod
    def _accept(
        moving: Moving,
        guess: Guess,
        taken: Bool[Array, " rows"],
        own: int,
        caches: tuple[Cache, ...],
        drawn: _Drawn,
        stopped: Bool[Array, "rows turns"],
        failed: Bool[Array, "rows turns"],
    ) -> Moving:
        """
        Args:
          taken: rows whose branch is right.
          drawn, stopped, failed: along each row's draft, or along its branch where that is taken.
        """
        rows, seen, drafting, asking, counts, _, output = moving
        draft, runs, length, branch = guess
        right = jnp.where(taken, 0, _agreeing(draft.tokens, drawn.tokens, length))
        on_branch = jnp.zeros_like(right)
        if branch is not None:
            on_branch = jnp.where(taken, _agreeing(branch[0].tokens, drawn.tokens, branch[1]), 0)
        count = _said(rows, right + on_branch, stopped)
        after = _advance_by(rows, count, drawn.tokens, stopped, failed)
        is_said = jnp.arange(drawn.tokens.shape[1])[None] < count[:, None]
        seen = remember(seen, drawn.tokens, is_said)
        left = Runs(*jnp.zeros_like(jnp.stack(runs))) if drafting is None else drafting.runs
        counts = counts.with_step(left, draft, length, right, rows.live)
        if drafting is not None and branch is not None:
            first = drawn.tokens[:, 0]
            counts = counts.with_branches(runs.kind, draft, *branch, on_branch, first, rows.live)
            accepted = jnp.maximum(count - 1, 0)
            for one, verified, is_right in ((draft, length, ~taken), (*branch, taken)):
                source = source_of(one, drafting.borders, own)
                counts = counts.with_sources(source, verified, jnp.where(is_right, accepted, 0))
            text = append(drafting.text, drawn.tokens, count, own + rows.position + 1)
            drafting = drafting._replace(text=text, runs=left_by(runs, length, right))
        if asking is not None:
            before = jnp.concatenate([rows.last_token[:, None], drawn.tokens], axis=1)
            before = jnp.take_along_axis(before, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
            asking = asking._replace(previous=jnp.where(count > 0, before, asking.previous))
        output = _noted(output, drawn, rows, after, count)
        return Moving(after, seen, drafting, asking, counts, caches, output)

    def _logits(
        self,
        params: Params,
        tokens: Int[Array, "rows length"],
        positions: Int[Array, "rows length"],
        caches: Sequence[PagedLayer | BurstLayer | DraftPages | DraftRows],
    ) -> tuple[Float[Array, "rows length vocab"], tuple[Cache, ...]]:
        model, partition = self.policy.bind(params), ManualPartition(self.layout)
        hidden, written = model(
            tokens, positions, tuple(caches), partition=partition, dtype=self.dtype
        )
        assert written is not None  # caches went in
        return model.logits(hidden, partition), tuple(map(kept, written))

    def _draw(
        self,
        logits: Float[Array, "rows vocab"],
        numbers: Float[Array, " rows"],
        position: Int[Array, " rows"],
        sampling: RowSampling,
        seen: Seen,
        endings: Int[Array, "rows endings"],
        ahead: Ahead | None,
    ) -> _Drawn:
        vocab_size = self.policy.config.vocab_size
        drawn = self.sample(logits, numbers, position, sampling, seen, endings, ahead)
        top = likeliest(logits, sampling.wants_top, count=self.max_logprobs, vocab_size=vocab_size)
        return _Drawn(*drawn, *top)

    def sample(
        self,
        logits: Float[Array, "rows vocab"],
        numbers: Float[Array, " rows"],
        position: Int[Array, " rows"],
        sampling: RowSampling,
        seen: Seen,
        endings: Int[Array, "rows endings"],
        ahead: Ahead | None,
    ) -> tuple[Array, Array, Array]:
        may_end = position + 1 >= sampling.may_end_at
        forbidden = jnp.where(may_end[:, None], NO_TOKEN, endings)
        vocab_size = self.policy.config.vocab_size
        return sample(logits, numbers, sampling, seen, forbidden, ahead, vocab_size=vocab_size)

    def endings(self, rows: RowState) -> Int[Array, "rows endings"]:
        """The tokens that end each row's response, NO_TOKEN where there are fewer."""
        eos = jnp.asarray(self.eos_ids, jnp.int32)[None, :]
        eos = jnp.where(rows.ignore_eos[:, None], NO_TOKEN, eos)
        return jnp.concatenate([eos, rows.sampling.stop_ids], axis=1)


def _pages(cache: Cache) -> LayerPages:
    assert isinstance(cache, LayerPages), "a burst's caches are all of one kind"
    return cache


def views(
    caches: Sequence[Cache],
    tables: Int[Array, "rows width"],
    rows: RowState,
    line: Line,
    turns: int,
) -> tuple[DraftRows | DraftPages, ...]:
    """The caches for a line; pages by tables of live rows that reach as far as the last of `turns` of a
    row that is near its end."""
    if isinstance(caches[0], DraftCopy):
        return tuple(DraftRows(x, line) for x in caches if isinstance(x, DraftCopy))
    pages = [_pages(x) for x in caches]
    own = jnp.where(rows.live[:, None], tables, NULL_PAGE)
    behind = num_pages_for(turns, pages[0].keys.shape[2])
    table = jnp.pad(own, ((0, 0), (0, behind)), constant_values=NULL_PAGE)
    return tuple(DraftPages(*x, table, line) for x in pages)


def kept(cache: PagedLayer | BurstLayer | DraftPages | DraftRows) -> Cache:
    """What a loop is to carry: tables and lines are the same for all layers, or of one step."""
    match cache:
        case DraftRows():
            return cache.copy
        case PagedLayer() | DraftPages():
            return LayerPages(cache.keys, cache.values)
    return cache


def on_branches(
    caches: tuple[Cache, ...],
    tables: Int[Array, "rows width"],
    rows: RowState,
    line: Line,
    turns: int,
    taken: Bool[Array, " rows"],
) -> tuple[Cache, ...]:
    """With the branches that are right in the places of what was drafted before them."""

    def move(_: Array, caches: tuple[Cache, ...]) -> tuple[Cache, ...]:
        return tuple(kept(x.on_branch(taken)) for x in views(caches, tables, rows, line, turns))

    # A loop of one turn or none: a condition would copy the caches that it hands through.
    return jax.lax.fori_loop(0, jnp.any(taken).astype(jnp.int32), move, caches)


def _paths(guess: Guess, line: Line) -> Int[Array, "tokens draft"]:
    """The draft that each token is of."""
    path = guess.draft.tokens[line.row]
    if guess.branch is None:
        return path
    return jnp.where(line.is_branch[:, None], guess.branch[0].tokens[line.row], path)


def _is_branch_right(guess: Guess, drawn: Int[Array, " rows"]) -> Bool[Array, " rows"]:
    """Whether it was verified and begins with what was drawn."""
    if guess.branch is None:
        return jnp.zeros(drawn.shape, bool)
    branch, length = guess.branch
    return (length > 0) & (branch.tokens[:, 0] == drawn)


def _agreeing(
    guesses: Int[Array, "rows draft"],
    tokens: Int[Array, "rows turns"],
    length: Int[Array, " rows"],
) -> Int[Array, " rows"]:
    """Guesses of each row, from its first to its last that was verified, that are what was drawn."""
    is_verified = jnp.arange(guesses.shape[1])[None] < length[:, None]
    agrees = is_verified & (guesses == tokens[:, :-1])
    return jnp.sum(jnp.cumprod(agrees, axis=1), axis=1, dtype=jnp.int32)


def _said(
    rows: RowState, right: Int[Array, " rows"], stopped: Bool[Array, "rows turns"]
) -> Int[Array, " rows"]:
    """Tokens that each row says: the right guesses and one more, or up to its end."""
    going_on = jnp.sum(jnp.cumprod(~stopped, axis=1), axis=1, dtype=jnp.int32)
    room = rows.end - 1 - rows.position
    return jnp.where(rows.live, jnp.minimum(jnp.minimum(right, going_on) + 1, room), 0)


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
        live_steps=output.live_steps + rows.live,
        live=after.live,
        steps=output.steps + 1,
    )
