"""A decode step that verifies drafts: each row generates its accepted draft tokens and one more.

Every position's token is sampled with its own noise, as without a draft. The draft is accepted up
to the first token that differs from the sampled one. If a draft has a branch, the first sampled
token chooses between them. So the output does not depend on the drafts: they only choose which
logits are computed ahead. N-gram drafts are accepted as often as by rejection sampling (arXiv
2211.17192, with a draft distribution of one token).
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pat_jax.engine.device.decode.decode_step import (
    Cache,
    Drawn,
    Moving,
    advance,
    kept,
    noted,
    views,
)
from pat_jax.engine.device.decode.sampling import Ahead, remember
from pat_jax.engine.device.draft.drafter import Accepted, Asked, Drafter, Proposal
from pat_jax.engine.device.token_batch import line_of
from pat_jax.engine.sequences.sequence_table import NO_TOKEN
from pat_jax.engine.sequences.state import RowState
from pat_jax.models.cache.draft_layer import Line


def verify(drafter: Drafter, asked: Asked, moving: Moving) -> Moving:
    """Runs one decode step in which each row generates its accepted draft tokens and one more."""
    step = asked.step
    rows = moving.rows
    with jax.named_scope("draft"):
        proposal, moving = drafter.propose(asked, moving)
        turns = 1 + proposal.draft.tokens.shape[1]
        room = len(rows.running) * (1 + asked.num_draft_tokens)
        of_branch = None if proposal.branch is None else proposal.branch[1]
        line = line_of(
            proposal.length, rows.running, rows.position, of_branch, room=room, turns=turns
        )
        path = _paths(proposal, line)
        known = _known(rows, line, path)
    position = line.start[line.row] + line.depth
    lines = views(moving.caches, asked.tables, rows, line, turns)
    logits, caches, routed = step.logits(asked.params, known[None], position[None], lines)
    with jax.named_scope("sample"):
        key = asked.keys[moving.output.emitted[line.row] + line.depth, line.row]
        sampling = jax.tree.map(lambda x: x[line.row], rows.sampling)
        endings = step.endings(rows)[line.row]
        is_before = jnp.arange(path.shape[1])[None] < line.depth[:, None]
        ahead = Ahead(line.row, jnp.where(is_before, path, NO_TOKEN))
        drawn = step.draw(
            logits[0], routed[0], key, position, sampling, moving.seen, endings, ahead
        )
        failed = jnp.isnan(drawn.logprobs)
        stopped = jnp.any(drawn.tokens[:, None] == endings, axis=1) | failed
    with jax.named_scope("accept"):
        taken = _is_branch_accepted(proposal, drawn.tokens[line.place[:, 0]])
        place = line.place
        if proposal.branch is not None:
            caches = _on_branches(caches, asked.tables, rows, line, turns, taken)
            behind = jnp.take_along_axis(place, 1 + line.moved(taken), axis=1)
            place = jnp.concatenate([place[:, :1], behind], axis=1)
        drawn, stopped, failed = jax.tree.map(lambda x: x[place], (drawn, stopped, failed))
        moving = moving._replace(caches=caches)
        return _accept(drafter, asked, moving, proposal, taken, drawn, stopped, failed)


def _known(rows: RowState, line: Line, path: Int[Array, "tokens draft"]) -> Int[Array, " tokens"]:
    """The line's tokens: each row's newest one and its drafts."""
    before = jnp.maximum(line.depth - 1, 0)[:, None]
    known = jnp.take_along_axis(path, before, axis=1)[:, 0]
    known = jnp.where(line.depth > 0, known, rows.last_token[line.row])
    return jnp.where(line.is_taken, known, NO_TOKEN)


def _accept(
    drafter: Drafter,
    asked: Asked,
    moving: Moving,
    proposal: Proposal,
    taken: Bool[Array, " rows"],
    drawn: Drawn,
    stopped: Bool[Array, "rows turns"],
    failed: Bool[Array, "rows turns"],
) -> Moving:
    """Updates rows, drafter and output with the accepted tokens.

    Args:
      moving: the state before the step, except that the caches are new.
      taken: rows whose branch is accepted.
      drawn, stopped, failed: for the tokens of each row's draft, or of its branch if that is taken.
    """
    rows = moving.rows
    tokens = drawn.tokens
    num_agreeing = jnp.where(taken, 0, _agreeing(proposal.draft.tokens, tokens, proposal.length))
    on_branch = jnp.zeros_like(num_agreeing)
    if proposal.branch is not None:
        branch, length = proposal.branch
        on_branch = jnp.where(taken, _agreeing(branch.tokens, tokens, length), 0)
    count = _num_generated(rows, num_agreeing + on_branch, stopped)
    after = _advance_by(rows, count, tokens, stopped, failed)
    is_generated = jnp.arange(tokens.shape[1])[None] < count[:, None]
    seen = remember(moving.seen, tokens, is_generated)
    accepted = Accepted(tokens, count, num_agreeing, on_branch, taken)
    drafting, counts = drafter.catch_up(asked, moving, proposal, accepted)
    output = noted(moving.output, drawn, rows, after, count)
    return Moving(after, seen, drafting, counts, moving.caches, output)


def _on_branches(
    caches: tuple[Cache, ...],
    tables: Int[Array, "rows width"],
    rows: RowState,
    line: Line,
    turns: int,
    taken: Bool[Array, " rows"],
) -> tuple[Cache, ...]:
    """Moves the KV cache of accepted branches to the positions of the rejected drafts."""

    def move(_: Array, caches: tuple[Cache, ...]) -> tuple[Cache, ...]:
        return tuple(kept(x.on_branch(taken)) for x in views(caches, tables, rows, line, turns))

    # A loop of one turn or none: a condition would copy the caches that it passes through.
    return jax.lax.fori_loop(0, jnp.any(taken).astype(jnp.int32), move, caches)


def _paths(proposal: Proposal, line: Line) -> Int[Array, "tokens draft"]:
    """The draft or branch that each token of the line belongs to."""
    path = proposal.draft.tokens[line.row]
    if proposal.branch is None:
        return path
    return jnp.where(line.is_branch[:, None], proposal.branch[0].tokens[line.row], path)


def _is_branch_accepted(proposal: Proposal, drawn: Int[Array, " rows"]) -> Bool[Array, " rows"]:
    """Whether each row's branch was verified and begins with the sampled token."""
    if proposal.branch is None:
        return jnp.zeros(drawn.shape, bool)
    branch, length = proposal.branch
    return (length > 0) & (branch.tokens[:, 0] == drawn)


def _agreeing(
    proposed: Int[Array, "rows draft"],
    tokens: Int[Array, "rows turns"],
    length: Int[Array, " rows"],
) -> Int[Array, " rows"]:
    """The number of each row's draft tokens before the first unverified or rejected one."""
    is_verified = jnp.arange(proposed.shape[1])[None] < length[:, None]
    agrees = is_verified & (proposed == tokens[:, :-1])
    return jnp.sum(jnp.cumprod(agrees, axis=1), axis=1, dtype=jnp.int32)


def _num_generated(
    rows: RowState, num_agreeing: Int[Array, " rows"], stopped: Bool[Array, "rows turns"]
) -> Int[Array, " rows"]:
    """The number of tokens that each row generates: accepted ones and one more, up to its end."""
    going_on = jnp.sum(jnp.cumprod(~stopped, axis=1), axis=1, dtype=jnp.int32)
    room = rows.end - 1 - rows.position
    return jnp.where(rows.running, jnp.minimum(jnp.minimum(num_agreeing, going_on) + 1, room), 0)


def _advance_by(
    rows: RowState,
    num_generated: Int[Array, " rows"],
    tokens: Int[Array, "rows queries"],
    stopped: Bool[Array, "rows queries"],
    failed: Bool[Array, "rows queries"],
) -> RowState:
    """Advances each row by its first `num_generated` tokens, the last of which may end it."""
    last = jnp.maximum(num_generated - 1, 0)[:, None]
    token, stops, fails = (
        jnp.take_along_axis(x, last, axis=1)[:, 0] for x in (tokens, stopped, failed)
    )
    before = replace(rows, position=rows.position + jnp.maximum(num_generated - 1, 0))
    return advance(before, token, stops, fails)
