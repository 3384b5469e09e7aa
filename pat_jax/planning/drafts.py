"""Predicts how many draft tokens are accepted, from the bursts observed so far.

Knows counts. Does not know where drafts come from, nor what verifying them costs.

A *run* is the text that a draft of unlimited length would predict correctly. It begins with an
n-gram match; the *kind* of the match is a range of its length. A run lasts several steps if drafts
are shorter than it. So two things predict the acceptance of drafts of any length: the kinds of
matches that runs begin with, and the probability that a run goes on for another token. The matches
of single steps do not predict it: short drafts meet the same long match again and again.

A row may also verify a *branch*: a second draft that begins with another token. A branch can be
right only where the draft's first token is wrong. How often it is right depends on the kind of its
own match. After an accepted branch, the next step begins a new run.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pat_jax.planning.draft_counts import BRANCHES, DRAFTS, GENERATED, KINDS, MAX_RUN, DraftResult

# Before any burst was observed: how often the first, second, … token of a run is right if those
# before it are, by the kind of its match; further tokens as the last. Counted on responses of seven
# models of equal weight (own text and siblings, all sets but codegen;
# `python -m benchmarks.speculation.draft_acceptance`).
PRIOR = (
    (0.26, 0.48, 0.58, 0.62, 0.66, 0.71, 0.73, 0.78),
    (0.41, 0.51, 0.59, 0.65, 0.67, 0.72, 0.73, 0.76),
    (0.48, 0.57, 0.63, 0.67, 0.71, 0.73, 0.75, 0.76),
    (0.54, 0.64, 0.69, 0.73, 0.75, 0.77, 0.79, 0.81),
    (0.69, 0.73, 0.77, 0.78, 0.81, 0.83, 0.83, 0.84),
    (0.86, 0.74, 0.82, 0.85, 0.88, 0.89, 0.92, 0.90),
)
# The same for branches, where the first token of the draft beside them was wrong.
PRIOR_BRANCHES = (
    (0.17, 0.45, 0.55, 0.63, 0.65, 0.72, 0.71, 0.71),
    (0.25, 0.49, 0.58, 0.61, 0.66, 0.70, 0.74, 0.74),
    (0.30, 0.52, 0.62, 0.66, 0.69, 0.71, 0.74, 0.76),
    (0.34, 0.57, 0.68, 0.69, 0.73, 0.75, 0.77, 0.80),
    (0.47, 0.67, 0.75, 0.78, 0.74, 0.84, 0.85, 0.86),
    (0.67, 0.80, 0.82, 0.85, 0.87, 0.92, 0.93, 0.96),
)
# The share of runs by the kind of match, none first, with drafts and branches of 8 tokens.
PRIOR_BEGUN = (0.147, 0.325, 0.213, 0.181, 0.098, 0.026, 0.010)
# The share of each kind of branch, none first, by the kind of the run beside it.
PRIOR_BRANCH_COUNTS = (
    (1.000, 0.000, 0.000, 0.000, 0.000, 0.000, 0.000),
    (0.221, 0.771, 0.002, 0.002, 0.002, 0.002, 0.000),
    (0.150, 0.288, 0.551, 0.004, 0.004, 0.003, 0.000),
    (0.090, 0.203, 0.239, 0.456, 0.006, 0.005, 0.001),
    (0.079, 0.151, 0.150, 0.249, 0.355, 0.013, 0.003),
    (0.084, 0.155, 0.140, 0.175, 0.227, 0.199, 0.020),
    (0.095, 0.182, 0.164, 0.175, 0.146, 0.105, 0.133),
)
# How often a token of a model's draft is right if those before it are. Not counted: high enough
# that a first burst tries drafts.
PRIOR_GENERATED = 0.6
PRIOR_RUNS = 1.0  # runs that the prior counts for, of each kind of match and each token
# Runs after which old counts weigh half. The frequency of matches changes from burst to burst, as
# texts grow and begin to repeat; their acceptance also changes with the prompt. These numbers
# predicted the next burst best.
BEGUN_HALVE = 500.0
ACCEPTED_HALVE = 2_000.0
MOST_GOES_ON = 0.999  # largest P(a run goes on) beyond the tokens that are counted: texts end
# A draft token is verified if its P(right) is at least a threshold, higher if there is less room.
THRESHOLDS = np.concatenate([[0.0], np.geomspace(0.02, 0.97, 15)])

Numbers = float | np.ndarray


def _prior_accepted(is_generated: bool) -> np.ndarray:
    """Returns the prior P(a token is right | those before it are), float[draft or branch, kinds of
    match, MAX_RUN]."""
    nothing = [0.0] * len(PRIOR[0])  # without a match there is no draft
    known = np.array([[nothing, *PRIOR], [nothing, *PRIOR_BRANCHES]])
    if is_generated:
        known[DRAFTS, GENERATED] = PRIOR_GENERATED
    return np.pad(known, ((0, 0), (0, 0), (0, MAX_RUN - known.shape[2])), mode="edge")


def _ahead(accept_prob: np.ndarray, draft: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns two arrays of probabilities. A place is the number of a run's tokens before a step.
    The first is P(the next 1, 2, … draft tokens are right): float[kinds of run, places, draft]. The
    second is P(those of a branch are right): float[kinds of run, places, kinds of branch,
    draft]."""
    places = np.arange(1 + MAX_RUN - draft)
    before = accept_prob[DRAFTS][:, places, None]
    after = accept_prob[DRAFTS][:, places[:, None] + 1 + np.arange(draft)]
    of_run = np.divide(after, before, where=before > 0, out=np.zeros(after.shape))
    is_wrong = 1 - of_run[:, :, :1, None]
    return of_run, is_wrong * accept_prob[BRANCHES, :, 1 : 1 + draft]


class Ways(NamedTuple):
    """Tables over the room for draft tokens: how many of them a row verifies in a step, and how
    many tokens it then generates. All numbers are means over the steps of all runs."""

    # float[1 + thresholds], draft tokens of a row: 0, then one number per `THRESHOLDS`, descending
    verified: np.ndarray
    generated: np.ndarray  # float[1 + thresholds], tokens generated with as many draft tokens
    alone: np.ndarray  # float[1 + draft], tokens generated if drafts always have 0, 1, … tokens

    def tokens(self, num_draft_tokens: Numbers, rows: Numbers) -> Numbers:
        """Returns the tokens that a row generates in a step.

        A step has room for a number of draft tokens over all rows: those likeliest to be right get
        it. With many rows, these are all tokens above some threshold. A row alone has all the room,
        however good its match is. Other numbers of rows lie in between.

        Args:
          num_draft_tokens: draft tokens of a step, per row; one number or several.
          rows: number of rows that share the room; one number, or one per `num_draft_tokens`.
        """
        together = np.interp(num_draft_tokens, self.verified, self.generated)
        alone = np.interp(num_draft_tokens, np.arange(len(self.alone)), self.alone)
        return together + (alone - together) / np.maximum(rows, 1.0)

    def drafted(self, num_draft_tokens: Numbers, rows: Numbers) -> Numbers:
        """Returns the draft tokens that a row verifies in a step; arguments as in `tokens`."""
        together = np.minimum(num_draft_tokens, self.verified[-1])
        alone = np.minimum(num_draft_tokens, len(self.alone) - 1)
        return together + (alone - together) / np.maximum(rows, 1.0)


@dataclass(frozen=True, eq=False)
class Acceptance:
    """Estimates how many tokens of a draft are accepted, by the kind of its match, and how often
    each kind occurs."""

    begun: np.ndarray  # float[kinds], runs that began with each kind of match
    proposed: np.ndarray  # float[2, kinds, MAX_RUN], as in `DraftResult`; old bursts weigh less
    accepted: np.ndarray  # float[2, kinds, MAX_RUN], those of `proposed` whose token was right
    branch_counts: np.ndarray  # float[kinds, kinds], steps by the kind of the run and of the branch
    is_generated: bool = False  # drafts come from a model, not from texts

    @classmethod
    def unseen(cls, *, is_generated: bool = False) -> "Acceptance":
        nothing = np.zeros((2, KINDS, MAX_RUN))
        begun = PRIOR_RUNS * np.array(PRIOR_BEGUN)
        branches = PRIOR_RUNS * np.array(PRIOR_BRANCH_COUNTS)
        return cls(begun, nothing, nothing, branches, is_generated)

    def observed(self, drafted: DraftResult) -> "Acceptance":
        """Returns the estimate after one more burst with drafts."""
        runs = float(drafted.begun.sum())
        if not runs:
            return self
        kept_begun, kept = (0.5 ** (runs / half) for half in (BEGUN_HALVE, ACCEPTED_HALVE))
        return replace(
            self,
            begun=kept_begun * self.begun + drafted.begun,
            branch_counts=kept_begun * self.branch_counts + drafted.branch_counts,
            proposed=kept * self.proposed + drafted.proposed,
            accepted=kept * self.accepted + drafted.accepted,
        )

    @cached_property
    def accept_prob(self) -> np.ndarray:
        """P(the first 0, 1, … tokens of a run are right), and the same of a branch, given that the
        draft's first token is wrong. Its shape is float[draft or branch, kinds of match, 1 +
        MAX_RUN]."""
        prior = PRIOR_RUNS * _prior_accepted(self.is_generated)
        rate = (self.accepted + prior) / (self.proposed + PRIOR_RUNS)
        if self.is_generated:  # a model is taken to be as good at a token as at the one before it
            for i in range(1, MAX_RUN):
                at = (DRAFTS, GENERATED, i)
                before = rate[DRAFTS, GENERATED, i - 1]
                seen = self.proposed[at] + PRIOR_RUNS
                rate[at] = (self.accepted[at] + PRIOR_RUNS * before) / seen
        return np.cumprod(np.pad(rate, ((0, 0), (0, 0), (1, 0)), constant_values=1.0), axis=2)

    @property
    def share(self) -> np.ndarray:
        """The share of all runs that begin with each kind of match, float[kinds]."""
        return self.begun / self.begun.sum()

    def tokens(self, num_draft_tokens: Numbers, draft: int, rows: Numbers) -> Numbers:
        """Returns the predicted tokens of a row in a step, 1 without drafts: see `Ways.tokens`.

        Args:
          draft: most tokens of one draft.
        """
        if self.is_generated:  # the drafts of all rows have the same length
            after = np.cumsum(self.accept_prob[DRAFTS, GENERATED, : 1 + draft])
            return np.interp(num_draft_tokens, np.arange(1 + draft), after)
        if draft not in self._known_ways:
            self._known_ways[draft] = self.ways(draft, self.accept_prob)
        return self._known_ways[draft].tokens(num_draft_tokens, rows)

    @cached_property
    def remembered(self) -> dict[tuple[int, int, bytes], np.ndarray]:
        """A cache for what the planner has computed from this estimate."""
        return {}

    @cached_property
    def _known_ways(self) -> "dict[int, Ways]":
        return {}

    def ways(self, draft: int, believed: np.ndarray) -> "Ways":
        """Returns draft tokens verified and tokens generated in a step, for any room for draft
        tokens.

        Args:
          draft: most tokens of one draft.
          believed: the `accept_prob` by which the room of a step is given to draft tokens.
        """
        of_run, of_branch = _ahead(believed, draft)
        of_run = np.broadcast_to(of_run[:, :, None], of_branch.shape)
        worth = np.concatenate([of_run, of_branch], axis=3)
        rank = np.argsort(np.argsort(-worth, axis=3, kind="stable"), axis=3)
        # Which tokens each way verifies, for each kind of run, place in it and kind of branch.
        is_wanted = (worth >= THRESHOLDS.reshape(-1, 1, 1, 1, 1)) & (worth > 0) & (rank < draft)
        is_first = rank < np.arange(1 + draft).reshape(-1, 1, 1, 1, 1)
        chosen = np.concatenate([is_wanted, is_first])
        lengths = chosen[..., :draft].sum(axis=4)
        branches = chosen[..., draft:].sum(axis=4)
        verified, generated = self._of_steps(lengths, branches, draft)
        bars = len(THRESHOLDS)
        by_room = np.maximum.accumulate([0.0, *verified[:bars][::-1]])
        return Ways(by_room, np.array([1.0, *generated[:bars][::-1]]), generated[bars:])

    @property
    def _branch_shares(self) -> np.ndarray:
        """The shares of the kinds of branches beside each kind of run, float[kinds, kinds]."""
        # Old counts fade to zero; a run without a match has no branch, and is never counted.
        total = self.branch_counts.sum(axis=1, keepdims=True)
        beside = np.where(total > 0, self.branch_counts, PRIOR_BRANCH_COUNTS)
        return beside / beside.sum(axis=1, keepdims=True)

    def _of_steps(
        self, lengths: np.ndarray, branches: np.ndarray, draft: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens verified and the tokens generated in a step, each float[ways]: means
        over the steps of all runs.

        Args:
          lengths, branches: tokens verified of the draft and of the branch: int[ways, kinds of run,
            places in the run, kinds of branch].
        """
        of_run, of_branch = (
            np.pad(x.cumsum(axis=-1), [(0, 0)] * (x.ndim - 1) + [(1, 0)])
            for x in _ahead(self.accept_prob, draft)
        )
        accept_prob = self.accept_prob[DRAFTS]
        kind = np.arange(KINDS)[:, None]
        ways, _, places, _ = lengths.shape
        comes = np.zeros((ways, KINDS, places))
        comes[:, :, 0] = self.share
        steps, verified, generated = (np.zeros(ways) for _ in range(3))
        for place in range(places):
            length, branch = lengths[:, :, place], branches[:, :, place]
            # All are right, and the token after them goes on with the run.
            then = np.minimum(place + length + 1, MAX_RUN)
            before = accept_prob[kind, place]
            goes_on = np.divide(
                accept_prob[kind, then], before, where=before > 0, out=np.zeros(then.shape)
            )
            here = comes[:, :, place]
            if place == places - 1:  # further ones are as this one: see `token_batch.met_by`
                mean = (self._branch_shares * goes_on).sum(axis=2)
                here = here / (1 - np.minimum(mean, MOST_GOES_ON))
            here = here[:, :, None] * self._branch_shares
            accepted = of_run[kind, place, length] + of_branch[kind, place, kind.T, branch]
            steps += here.sum(axis=(1, 2))
            verified += (here * (length + branch)).sum(axis=(1, 2))
            generated += (here * (1 + accepted)).sum(axis=(1, 2))
            next_place = np.minimum(place + length + 1, places - 1)
            np.add.at(comes, (np.arange(ways)[:, None, None], kind, next_place), here * goes_on)
        return verified / steps, generated / steps
