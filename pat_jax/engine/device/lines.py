"""Which tokens a step verifies: every live row's newest one, and of the drafts those likeliest to be right.

A step has room for a line of so many tokens. What drafts are worth differs by row: behind a long match
eight tokens are likelier right than two behind a short one. So the room goes to the tokens that are
likeliest right, whoever's they are; a token behind another of its draft never is likelier than that one.

How likely that is follows from the run that a draft is a part of (`planning/drafts.py`): the match with which
it began, and how many of its tokens have been right.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pat_jax.engine.device.suffix import CONTEXT, Draft
from pat_jax.engine.sequences.state import Runs
from pat_jax.models.draft_layer import Line
from pat_jax.planning.drafts import MATCHES, MOST, NONE_DRAFTED


def goes_on(left: Runs, draft: Draft) -> Bool[Array, " rows"]:
    """Whether what the step before has left does."""
    return (left.matched > 0) & (draft.matched >= left.matched)


def met_by(draft: Draft, left: Runs) -> Runs:
    """The runs that the drafts are parts of: those that go on, or new ones."""
    is_old, longest = goes_on(left, draft), draft.tokens.shape[1]
    begun = jnp.sum(draft.matched[:, None] >= jnp.asarray(MATCHES)[None], axis=1)
    place = jnp.minimum(left.place, MOST - longest)
    return Runs(jnp.where(is_old, left.kind, begun), jnp.where(is_old, place, 0), draft.matched)


def left_by(runs: Runs, length: Int[Array, " rows"], right: Int[Array, " rows"]) -> Runs:
    """When so many tokens were verified, and so many of them right: then one more was drawn."""
    more = length + 1
    matched = jnp.minimum(runs.matched + more, CONTEXT)
    may_go_on = (runs.matched > 0) & (right == length)
    return Runs(runs.kind, runs.place + more, jnp.where(may_go_on, matched, 0))


class Counts(NamedTuple):
    """Of runs, see `planning.drafts.Drafted`."""

    begun: Int[Array, "1 kinds"]
    tried: Int[Array, "1 kinds places"]
    right: Int[Array, "1 kinds places"]
    verified: Int[Array, " 1"]
    by_source: Int[Array, "1 sources 2"]

    @classmethod
    def none(cls) -> "Counts":
        return cls(*(jnp.zeros(x.shape, jnp.int32) for x in NONE_DRAFTED))

    def with_step(
        self,
        left: Runs,
        draft: Draft,
        length: Int[Array, " rows"],
        right: Int[Array, " rows"],
        live: Bool[Array, " rows"],
    ) -> "Counts":
        """
        Args:
          left: what the step before had left.
        """
        is_old, met = goes_on(left, draft), met_by(draft, left)
        # The token drawn last is one of its run's if the match is as long as it has to be.
        was_tried = live & (left.matched > 0)
        last = jnp.minimum(left.place, MOST) - 1
        turn = jnp.arange(draft.tokens.shape[1])[None]
        came_to = live[:, None] & (turn < length[:, None]) & (turn <= right[:, None])
        is_right = came_to & (turn < right[:, None])
        at = 0, met.kind[:, None], met.place[:, None] + turn

        def more(x: Array, of_last: Array, of_draft: Array) -> Array:
            x = x.at[0, left.kind, last].add(of_last.astype(x.dtype))
            return x.at[at].add(of_draft.astype(x.dtype))

        return Counts(
            self.begun.at[0, met.kind].add((live & ~is_old).astype(self.begun.dtype)),
            more(self.tried, was_tried, came_to),
            more(self.right, was_tried & is_old, is_right),
            self.verified + jnp.sum(jnp.where(live, length, 0)),
            self.by_source,
        )

    def with_sources(
        self,
        source: Int[Array, " rows"],
        length: Int[Array, " rows"],
        accepted: Int[Array, " rows"],
    ) -> "Counts":
        """
        Args:
          source: of each row's draft, see `planning.drafts.SOURCES`.
          length: tokens of it that were verified.
          accepted: and of these, those that were said.
        """
        more = jnp.stack([length, accepted], axis=1)
        return self._replace(by_source=self.by_source.at[0, source].add(more))


def source_of(
    draft: Draft, borders: Int[Array | np.ndarray, "rows 2"], own: int
) -> Int[Array, " rows"]:
    """Where each row's draft is copied from, a place in `planning.drafts.SOURCES`.

    Args:
      borders: see `texts.Texts`.
      own: the column at which a row's own text begins.
    """
    is_earlier = (draft.at >= borders[:, 0]) & (draft.at < borders[:, 1])
    return jnp.where(draft.at >= own, 0, 1 + is_earlier)


def lengths(
    draft: Draft,
    runs: Runs,
    live: Bool[Array, " rows"],
    reach: Float[Array, "kinds places"],
    *,
    room: int,
) -> Int[Array, " rows"]:
    """How many tokens of each row's draft are verified.

    Args:
      runs: that the drafts are parts of.
      reach: how likely the first tokens of a run are right, of none first, by its kind.
      room: tokens of a line; at least one for each row.
    """
    is_there = (draft.tokens >= 0) & live[:, None]
    ahead = runs.place[:, None] + 1 + jnp.arange(draft.tokens.shape[1])[None]
    before = reach[runs.kind, runs.place][:, None]
    value = jnp.where(is_there, reach[runs.kind[:, None], ahead] / jnp.maximum(before, 1e-30), 0.0)
    flat = jnp.ravel(value)
    # Of equally likely ones the first: so a draft is never entered in its middle.
    is_before = jnp.arange(len(flat))[None] < jnp.arange(len(flat))[:, None]
    is_ahead = (flat[None] > flat[:, None]) | ((flat[None] == flat[:, None]) & is_before)
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
) -> Line:
    """The line of the live rows' newest tokens and their drafts."""
    count = jnp.where(live, 1 + lengths, 0)
    stop = jnp.cumsum(count)
    first, at = stop - count, jnp.arange(room)
    is_taken = at < stop[-1]
    row = jnp.minimum(jnp.sum(at[:, None] >= stop[None], axis=1), len(count) - 1)
    turn = jnp.where(is_taken, at - first[row], 0)
    place = jnp.minimum(first[:, None] + jnp.arange(turns)[None], room - 1)
    return Line(row, is_taken, turn, place, start)
