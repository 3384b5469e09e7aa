"""Which tokens a step verifies: every live row's newest one, and of the drafts those likeliest to be right.

A step has room for a line of so many tokens. What drafts are worth differs by row: behind a long match
eight tokens are likelier right than two behind a short one. So the room goes to the tokens that are
likeliest right, whoever's they are; a token behind another of its draft never is likelier than that one.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pat_jax.engine.device.suffix import Draft
from pat_jax.models.draft_layer import Line
from pat_jax.planning.drafts import MATCHES


def kinds(draft: Draft) -> Int[Array, " rows"]:
    """Of each row's match, see `MATCHES`."""
    return jnp.sum(draft.matched[:, None] >= jnp.asarray(MATCHES)[None], axis=1)


def lengths(
    draft: Draft,
    live: Bool[Array, " rows"],
    worth: Float[Array, "matches draft"],
    *,
    room: int,
) -> Int[Array, " rows"]:
    """How many tokens of each row's draft are verified.

    Args:
      worth: how likely each token of a draft is right, those before it included, by kind of match.
      room: tokens of a line; at least one for each row.
    """
    is_there = (draft.tokens >= 0) & live[:, None]
    value = jnp.where(is_there, worth[kinds(draft)], 0.0)
    flat = jnp.ravel(value)
    # Of equally likely ones the first: so a draft is never entered in its middle.
    before = jnp.arange(len(flat))[None] < jnp.arange(len(flat))[:, None]
    is_ahead = (flat[None] > flat[:, None]) | ((flat[None] == flat[:, None]) & before)
    rank = jnp.reshape(jnp.sum(is_ahead, axis=1), value.shape)
    left = room - jnp.sum(live)
    return jnp.sum((rank < left) & (value > 0), axis=1, dtype=jnp.int32)


def line_of(
    lengths: Int[Array, " rows"],
    live: Bool[Array, " rows"],
    start: Int[Array, " rows"],
    *,
    room: int,
    turns: int,
) -> tuple[Line, Bool[Array, " room"]]:
    """The line of the live rows' newest tokens and their drafts, and which of its places are taken."""
    count = jnp.where(live, 1 + lengths, 0)
    stop = jnp.cumsum(count)
    first, at = stop - count, jnp.arange(room)
    is_taken = at < stop[-1]
    row = jnp.minimum(jnp.sum(at[:, None] >= stop[None], axis=1), len(count) - 1)
    turn = jnp.where(is_taken, at - first[row], 0)
    place = jnp.minimum(first[:, None] + jnp.arange(turns)[None], room - 1)
    return Line(row, turn, place, start), is_taken
