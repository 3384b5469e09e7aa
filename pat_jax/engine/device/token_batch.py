"""Chooses the tokens that a step verifies: each running row's newest, and the best draft tokens.

A step verifies a fixed number of tokens: its line, which all rows share. The draft tokens most
likely to be accepted get the room, whatever their row. No draft token is more likely to be accepted
than the one before it. A row may also have a branch: a second draft that begins with another token.
Tokens of drafts and branches compete for the room. Draft and branch form a tree, of which at most
one path is accepted.

A run is text that is copied from one match over several steps (`planning/drafts.py`). How likely a
token is to be accepted depends on two numbers: the length of the match at the start of its run, and
the number of the run's tokens accepted so far.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pat_jax.engine.device.ngram import CONTEXT, Draft
from pat_jax.engine.sequences.state import Runs
from pat_jax.models.cache.draft_layer import Line
from pat_jax.planning.draft_counts import BRANCHES, DRAFTS, MATCH_BIN_EDGES, MAX_RUN, NONE_DRAFTED


def goes_on(left: Runs, draft: Draft) -> Bool[Array, " rows"]:
    """Returns whether each row's draft continues the row's run from the step before."""
    return (left.matched > 0) & (draft.matched >= left.matched)


def met_by(draft: Draft, left: Runs) -> Runs:
    """Returns each row's run in this step: the continued run of the step before, or a new one."""
    is_old = goes_on(left, draft)
    longest = draft.tokens.shape[1]
    place = jnp.minimum(left.place, MAX_RUN - longest)
    kind = jnp.where(is_old, left.kind, kind_of(draft))
    return Runs(kind, jnp.where(is_old, place, 0), draft.matched)


def kind_of(draft: Draft) -> Int[Array, " rows"]:
    """Returns the kind of each draft: the bin of its match length."""
    return jnp.sum(draft.matched[:, None] >= jnp.asarray(MATCH_BIN_EDGES)[None], axis=1)


def left_by(
    runs: Runs,
    length: Int[Array, " rows"],
    accepted: Int[Array, " rows"],
    on_branch: Bool[Array, " rows"],
) -> Runs:
    """Returns each row's run after a step.

    A run may continue if all verified draft tokens were accepted; one more token was sampled then.
    A branch that is accepted ends its draft's run.

    Args:
      length: number of verified draft tokens of each row.
      accepted: number of accepted draft tokens of each row.
      on_branch: rows whose branch was accepted.
    """
    more = length + 1
    matched = jnp.minimum(runs.matched + more, CONTEXT)
    may_go_on = (runs.matched > 0) & (accepted == length) & ~on_branch
    return Runs(runs.kind, runs.place + more, jnp.where(may_go_on, matched, 0))


class Counts(NamedTuple):
    """Counts of runs and draft tokens on one replica, see `planning.draft_counts.DraftResult`."""

    begun: Int[Array, "1 kinds"]
    proposed: Int[Array, "1 2 kinds places"]
    accepted: Int[Array, "1 2 kinds places"]
    branch_counts: Int[Array, "1 kinds kinds"]
    verified: Int[Array, " 1"]
    by_source: Int[Array, "1 sources 3"]

    @classmethod
    def none(cls) -> "Counts":
        return cls(*(jnp.zeros(np.shape(x), jnp.int32) for x in NONE_DRAFTED))

    def with_step(
        self,
        left: Runs,
        draft: Draft,
        length: Int[Array, " rows"],
        accepted: Int[Array, " rows"],
        running: Bool[Array, " rows"],
    ) -> "Counts":
        """Returns the counts with a step's drafts added.

        Args:
          left: each row's run after the step before, see `left_by`.
          length, accepted: numbers of verified and accepted tokens of each row's draft.
        """
        is_old, met = goes_on(left, draft), met_by(draft, left)
        # The token sampled last belongs to its run if the run continues.
        was_proposed = running & (left.matched > 0)
        last = jnp.minimum(left.place, MAX_RUN) - 1
        turn = jnp.arange(draft.tokens.shape[1])[None]
        came_to = running[:, None] & (turn < length[:, None]) & (turn <= accepted[:, None])
        is_accepted = came_to & (turn < accepted[:, None])
        at = 0, DRAFTS, met.kind[:, None], met.place[:, None] + turn

        def more(x: Array, of_last: Array, of_draft: Array) -> Array:
            x = x.at[0, DRAFTS, left.kind, last].add(of_last.astype(x.dtype))
            return x.at[at].add(of_draft.astype(x.dtype))

        return self._replace(
            begun=self.begun.at[0, met.kind].add((running & ~is_old).astype(self.begun.dtype)),
            proposed=more(self.proposed, was_proposed, came_to),
            accepted=more(self.accepted, was_proposed & is_old, is_accepted),
            verified=self.verified + jnp.sum(jnp.where(running, length, 0)),
        )

    def with_branches(
        self,
        kind: Int[Array, " rows"],
        draft: Draft,
        branch: Draft,
        length: Int[Array, " rows"],
        accepted: Int[Array, " rows"],
        drawn: Int[Array, " rows"],
        running: Bool[Array, " rows"],
    ) -> "Counts":
        """Returns the counts with a step's branches added.

        Args:
          kind: kind of the run that each row's draft belongs to.
          length, accepted: numbers of verified and accepted tokens of each row's branch.
          drawn: the token that each row sampled first. It shows whether the branch's first token
            would have been accepted, even if it was not verified.
        """
        has_draft = running & (draft.matched > 0)
        own = kind_of(branch)
        has_branch = has_draft & (branch.matched > 0) & (draft.tokens[:, 0] != drawn)
        turn = jnp.arange(branch.tokens.shape[1])[None]
        is_first = (branch.tokens[:, 0] == drawn)[:, None] & (turn == 0)
        came_to = has_branch[:, None] & (
            (turn == 0) | ((turn < length[:, None]) & (turn <= accepted[:, None]))
        )
        is_accepted = came_to & (is_first | (turn < accepted[:, None]))
        at = 0, BRANCHES, own[:, None], turn
        return self._replace(
            proposed=self.proposed.at[at].add(came_to.astype(self.proposed.dtype)),
            accepted=self.accepted.at[at].add(is_accepted.astype(self.accepted.dtype)),
            branch_counts=self.branch_counts.at[0, kind, own].add(
                has_draft.astype(self.branch_counts.dtype)
            ),
            verified=self.verified + jnp.sum(jnp.where(running, length, 0)),
        )

    def with_sources(
        self,
        source: Int[Array, " rows"],
        length: Int[Array, " rows"],
        accepted: Int[Array, " rows"],
        *,
        is_branch: bool,
    ) -> "Counts":
        """Returns the counts with a step's draft tokens added by the source of their text.

        Args:
          source: source of each row's draft or branch, see `planning.draft_counts.SOURCES`.
          length, accepted: numbers of verified and accepted tokens of the draft or branch.
        """
        more = jnp.stack([length, accepted, accepted * is_branch], axis=1)
        return self._replace(by_source=self.by_source.at[0, source].add(more))


def source_of(
    draft: Draft, borders: Int[Array | np.ndarray, "rows 2"], own: int
) -> Int[Array, " rows"]:
    """Returns the source of each row's draft, an index of `planning.draft_counts.SOURCES`.

    Args:
      borders: see `texts.Texts`.
      own: the column where a row's own text begins.
    """
    is_earlier = (draft.at >= borders[:, 0]) & (draft.at < borders[:, 1])
    return jnp.where(draft.at >= own, 0, 1 + is_earlier)


def lengths(
    draft: Draft,
    branch: Draft,
    runs: Runs,
    running: Bool[Array, " rows"],
    accept_prob: Float[Array, "2 kinds places"],
    *,
    room: int,
) -> tuple[Int[Array, " rows"], Int[Array, " rows"]]:
    """Returns how many tokens of each row's draft and branch to verify.

    A row's two numbers together are at most the length of the longest possible draft.

    Args:
      runs: the runs that the drafts belong to.
      accept_prob: for each kind of run, the probability that its first 0, 1, 2 … tokens are all
        accepted. Then the same of branches, given that the draft's first token is rejected.
      room: number of tokens of a line; at least one for each row.
    """
    most = draft.tokens.shape[1]
    turn = jnp.arange(most)[None]
    ahead = runs.place[:, None] + 1 + turn
    before = accept_prob[DRAFTS, runs.kind, runs.place][:, None]
    of_draft = accept_prob[DRAFTS, runs.kind[:, None], ahead] / jnp.maximum(before, 1e-30)
    of_branch = (1 - of_draft[:, :1]) * accept_prob[BRANCHES, kind_of(branch)[:, None], 1 + turn]
    is_there = jnp.concatenate([draft.tokens, branch.tokens], axis=1) >= 0
    value = jnp.concatenate([of_draft, of_branch], axis=1)
    value = jnp.where(is_there & running[:, None], value, 0.0)
    value = jnp.where(_rank(value) < most, value, 0.0)
    is_chosen = jnp.reshape(_rank(jnp.ravel(value)), value.shape) < room - jnp.sum(running)
    chosen = (is_chosen & (value > 0)).astype(jnp.int32)
    return jnp.sum(chosen[:, :most], axis=1), jnp.sum(chosen[:, most:], axis=1)


def _rank(value: Float[Array, "*rest values"]) -> Int[Array, "*rest values"]:
    """For each value, how many are larger, or equal and before it. So a token of a draft is chosen
    only together with the tokens before it."""
    place = jnp.arange(value.shape[-1])
    is_before = jnp.broadcast_to(place[None] < place[:, None], (*value.shape, len(place)))
    mine = value[..., :, None]
    other = value[..., None, :]
    is_ahead = (other > mine) | ((other == mine) & is_before)
    return jnp.sum(is_ahead, axis=-1, dtype=jnp.int32)


def line_of(
    lengths: Int[Array, " rows"],
    running: Bool[Array, " rows"],
    start: Int[Array, " rows"],
    branches: Int[Array, " rows"] | None = None,
    *,
    room: int,
    turns: int,
) -> Line:
    """Returns the line of the running rows' newest tokens, each followed by its draft and branch.

    Args:
      lengths, branches: numbers of tokens of each row's draft and branch to verify.
      room: number of tokens of the line.
      turns: the most tokens of one row.
    """
    count = jnp.where(running, 1 + lengths + (0 if branches is None else branches), 0)
    stop = jnp.cumsum(count)
    first = stop - count
    at = jnp.arange(room)
    is_taken = at < stop[-1]
    row = jnp.minimum(jnp.sum(at[:, None] >= stop[None], axis=1), len(count) - 1)
    turn = jnp.where(is_taken, at - first[row], 0)
    place = jnp.minimum(first[:, None] + jnp.arange(turns)[None], room - 1)
    return Line(row, is_taken, turn, place, start, None if branches is None else lengths)
