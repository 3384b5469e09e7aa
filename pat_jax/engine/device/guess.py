"""What a step guesses: drafts copied from texts, or said by the policy's first layers.

A draft that is said costs a pass through those layers for each of its tokens. Each is drawn with its position's
own noise, as the policy will draw its own: the nearer the two distributions are to each other, the more
often both draw the same token. So drafts at temperature 1 are worth more than the likeliest tokens would be.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pat_jax.engine.device.lines import lengths, met_by
from pat_jax.engine.device.suffix import Draft, find
from pat_jax.engine.sequences.state import Drafting, RowState, Runs
from pat_jax.engine.sequences.types import NO_TOKEN
from pat_jax.models.draft_layer import Line


class Guess(NamedTuple):
    draft: Draft
    runs: Runs  # that the drafts are parts of
    length: Int[Array, " rows"]  # tokens of each row's draft that are verified
    # Another draft of each row, which begins with another token, and how much of it is verified.
    branch: tuple[Draft, Int[Array, " rows"]] | None = None


def copied(
    rows: RowState,
    drafting: Drafting,
    reach: Float[Array, "2 kinds places"],
    *,
    own: int,
    longest: int,
    room: int,
) -> Guess:
    """What followed the longest match of each row's last tokens, and what else followed them.

    Args:
      reach: see `lines.lengths`.
      own: column of a text at which the row's own begins.
      longest: tokens of a draft.
      room: tokens of a line.
    """
    draft, branch = find(drafting.text, own + rows.position, most=longest)
    runs = met_by(draft, drafting.runs)
    length, of_branch = lengths(draft, branch, runs, rows.live, reach, room=room)
    return Guess(draft, runs, length, (branch, of_branch))


# From the two newest tokens of each row, the position of the last, its turn and the guesses so far: the next
# one's guess.
Say = Callable[[tuple[Array, Array], Array, Int[Array, ""], Array, tuple], tuple[Array, tuple]]


def said(
    rows: RowState, previous: Int[Array, " rows"], say: Say, caches: Sequence, *, count: int
) -> tuple[Guess, tuple]:
    """What a model says, `count` tokens of each row one behind the other.

    Every draft is a run of its own, of the first kind: nobody asks a model what it would have said
    behind its last token.

    Args:
      previous: the token before each row's newest one, where `say` looks at it.
      caches: that `say` writes to.
    """
    num_rows = len(rows.live)

    def one_more(turn: Int[Array, ""], carry: tuple) -> tuple:
        previous, newest, guesses, caches = carry
        recent = previous, newest
        token, caches = say(recent, rows.position + turn, turn, guesses, caches)
        return newest, token, guesses.at[:, turn].set(token), caches

    nothing = jnp.full((num_rows, count), NO_TOKEN, jnp.int32)
    carry = previous, rows.last_token, nothing, tuple(caches)
    _, _, guesses, written = jax.lax.fori_loop(0, count, one_more, carry)
    draft = Draft(guesses, *jnp.asarray([[1], [0]], jnp.int32).repeat(num_rows, axis=1))
    runs = met_by(draft, Runs(*jnp.zeros((3, num_rows), jnp.int32)))
    return Guess(draft, runs, jnp.where(rows.live, count, 0)), written


def two_each(live: Bool[Array, " rows"], position: Int[Array, " rows"]) -> Line:
    """The line of each row's token at `position` and the one before it; of a first one, of that behind it."""
    row, turn = jnp.repeat(jnp.arange(len(live)), 2), jnp.tile(jnp.arange(2), len(live))
    place = jnp.reshape(jnp.arange(2 * len(live)), (-1, 2))
    return Line(row, jnp.repeat(live, 2), turn, place, jnp.maximum(position - 1, 0))


def one_each(live: Bool[Array, " rows"], position: Int[Array, " rows"]) -> Line:
    """The line of one token of each row."""
    row = jnp.arange(len(live))
    return Line(row, live, jnp.zeros_like(row), row[:, None], position)
