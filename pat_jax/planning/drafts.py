"""What drafts are worth: how many of their tokens are accepted, as far as a run has seen it.

Knows counts. Does not know where drafts come from, nor what verifying them costs.

A *run* is what a draft without end would get right at once. It begins with a match of some kind, and goes
on over several steps where drafts are shorter than it is. So what kinds of matches runs begin with, and how
likely they go on from token to token, say what drafts of any length are worth; matches met at each step
would not: short drafts meet the same long match again and again.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

# Matches of so many tokens and more are a kind of their own; shorter ones than the first are none.
MATCHES = (1, 2, 3, 5, 9, 16)
KINDS = len(MATCHES) + 1  # none first
SAID = 1  # the kind of drafts that a model says, each of which is a run of its own: see `device/guess.py`
MOST = 32  # tokens of a run that are told apart
# Before anything was seen. Counted on responses of seven models, which weigh the same (own text and
# siblings, all sets but codegen; `python -m benchmarks.draft_acceptance`). How often the first, second, …
# token of a run is right where those before it are, by the kind of its match; further ones as the last.
PRIOR = (
    (0.26, 0.48, 0.58, 0.62, 0.66, 0.71, 0.73, 0.78),
    (0.42, 0.52, 0.60, 0.65, 0.68, 0.72, 0.73, 0.76),
    (0.48, 0.57, 0.63, 0.67, 0.71, 0.73, 0.76, 0.76),
    (0.55, 0.64, 0.69, 0.72, 0.75, 0.77, 0.78, 0.81),
    (0.67, 0.72, 0.76, 0.77, 0.80, 0.82, 0.83, 0.84),
    (0.86, 0.75, 0.80, 0.84, 0.89, 0.89, 0.92, 0.91),
)
PRIOR_BEGUN = (0.135, 0.297, 0.233, 0.202, 0.102, 0.023, 0.009)  # of the runs with drafts of 8
# Of drafts that a model says, how often each token is right where those before it are. Nobody has counted them
# here: high enough that a first burst tries.
PRIOR_SAID = 0.6
PRIOR_RUNS = 1.0  # that it counts for, of each kind of match and each token
# Runs after which what was seen counts half: how often matches come changes from burst to burst, as texts
# grow and begin to repeat; how good they are with the prompt too. What foretold the next burst best.
BEGUN_HALVE, RIGHT_HALVE = 500.0, 2_000.0
MOST_GOES_ON = 0.999  # of the steps at the far end of a run: texts end
# How likely right a token must be to be verified: what the room of a step comes to.
BARS = np.concatenate([[0.0], np.geomspace(0.02, 0.97, 15)])

Numbers = float | np.ndarray


# What a draft is copied from: a response's own text, others to its prompt, responses of earlier iterations.
SOURCES = "own", "siblings", "earlier"
NO_SOURCES = np.zeros((len(SOURCES), 2), np.int64)


class Drafted(NamedTuple):
    """What came of the drafts of a burst, by the kind of match with which runs began."""

    begun: np.ndarray  # int[kinds], runs
    tried: np.ndarray  # int[kinds, MOST], that came to each token and had it drawn
    right: np.ndarray  # int[kinds, MOST], where it was right
    verified: int  # tokens of drafts
    # int[sources, 2], of these, and of those that were said; none of drafts that are not copied.
    by_source: np.ndarray = NO_SOURCES


# Of the one group of a burst that drafts nothing, as `RowsOutput` has it.
NONE_DRAFTED = (
    np.zeros((1, KINDS), np.int64),
    np.zeros((1, KINDS, MOST), np.int64),
    np.zeros((1, KINDS, MOST), np.int64),
    np.zeros(1, np.int64),
    NO_SOURCES[None],
)


def _prior_right(is_said: bool) -> np.ndarray:
    known = np.array([[0.0] * len(PRIOR[0]), *PRIOR])  # without a match there is no draft
    if is_said:
        known[SAID] = PRIOR_SAID
    return np.pad(known, ((0, 0), (0, MOST - known.shape[1])), mode="edge")


def _ahead(reach: np.ndarray, draft: int) -> np.ndarray:
    """P(the next tokens of a run are right), given it has come so far, float[kinds, places, draft]."""
    places = np.arange(1 + MOST - draft)
    before = reach[:, places, None]
    after = reach[:, places[:, None] + 1 + np.arange(draft)]
    return np.divide(after, before, where=before > 0, out=np.zeros(after.shape))


class Ways(NamedTuple):
    """What a step of a row comes to, on average over the steps of all runs."""

    verified: np.ndarray  # float[1 + bars], tokens of drafts: none, and the lowest of `BARS` last
    said: np.ndarray  # float[1 + bars], tokens
    alone: np.ndarray  # float[1 + draft], said where drafts always have so many tokens

    def tokens(self, budget: Numbers, rows: Numbers) -> Numbers:
        """What a row says in a step.

        The room goes to the tokens that are likeliest right. Of many rows those that are likelier than
        some bar have room; a row alone has all the room there is, whatever its match is worth. In between
        lies what is between.

        Args:
          budget: tokens of drafts that a step has room for, for each row; one number or several.
          rows: that share the room, as many.
        """
        together = np.interp(budget, self.verified, self.said)
        alone = np.interp(budget, np.arange(len(self.alone)), self.alone)
        return together + (alone - together) / np.maximum(rows, 1.0)

    def drafted(self, budget: Numbers, rows: Numbers) -> Numbers:
        """Tokens of drafts that are verified for it."""
        together = np.minimum(budget, self.verified[-1])
        alone = np.minimum(budget, len(self.alone) - 1)
        return together + (alone - together) / np.maximum(rows, 1.0)


@dataclass(frozen=True, eq=False)
class Acceptance:
    """How long runs are, by the kind of match with which they begin, and how often each kind comes."""

    begun: np.ndarray  # float[kinds], runs
    tried: np.ndarray  # float[kinds, MOST], runs that came to each token
    right: np.ndarray  # float[kinds, MOST], where it was right
    is_said: bool = False  # by a model, not copied

    @classmethod
    def unseen(cls, *, is_said: bool = False) -> "Acceptance":
        nothing = np.zeros((KINDS, MOST))
        return cls(PRIOR_RUNS * np.array(PRIOR_BEGUN), nothing, nothing, is_said)

    def observed(self, drafted: Drafted) -> "Acceptance":
        """After a burst with drafts."""
        runs = float(drafted.begun.sum())
        kept = 0.5 ** (runs / RIGHT_HALVE)
        return replace(
            self,
            begun=0.5 ** (runs / BEGUN_HALVE) * self.begun + drafted.begun,
            tried=kept * self.tried + drafted.tried,
            right=kept * self.right + drafted.right,
        )

    @cached_property
    def reach(self) -> np.ndarray:
        """P(the first tokens of a run are right), float[kinds, 1 + MOST], of none first."""
        rate = (self.right + PRIOR_RUNS * _prior_right(self.is_said)) / (self.tried + PRIOR_RUNS)
        if self.is_said:  # a model is taken to be as good at a token as at the one before it
            for i in range(1, MOST):
                right, tried = self.right[SAID, i], self.tried[SAID, i]
                rate[SAID, i] = (right + PRIOR_RUNS * rate[SAID, i - 1]) / (tried + PRIOR_RUNS)
        return np.cumprod(np.pad(rate, ((0, 0), (1, 0)), constant_values=1.0), axis=1)

    @property
    def share(self) -> np.ndarray:
        """Of the runs, how many begin with each kind of match, float[kinds]."""
        return self.begun / self.begun.sum()

    def tokens(self, budget: Numbers, draft: int, rows: Numbers) -> Numbers:
        """What a row is expected to say in a step, 1 without drafts: see `Ways.tokens`.

        Args:
          draft: most tokens of one draft.
        """
        if self.is_said:  # every row's draft is as long
            after = np.cumsum(self.reach[SAID, : 1 + draft])
            return np.interp(budget, np.arange(1 + draft), after)
        if draft not in self._known_ways:
            self._known_ways[draft] = self.ways(draft, self.reach)
        return self._known_ways[draft].tokens(budget, rows)

    @cached_property
    def _known_ways(self) -> "dict[int, Ways]":
        return {}

    def ways(self, draft: int, believed: np.ndarray) -> "Ways":
        """What steps come to, with more and more tokens verified.

        Args:
          draft: most tokens of one draft.
          believed: `reach` by which the room of a step is given to the tokens of its rows.
        """
        worth = _ahead(believed, draft)
        is_wanted = (worth[None] >= BARS[:, None, None, None]) & (worth[None] > 0)
        by_bar = is_wanted.sum(axis=3)
        always = np.arange(1 + draft)[:, None, None] + np.zeros_like(by_bar[:1])
        verified, said = self._of_steps(np.concatenate([by_bar, always]), draft)
        bars = len(BARS)
        by_room = (
            np.maximum.accumulate([0.0, *verified[:bars][::-1]]),
            np.array([1.0, *said[:bars][::-1]]),
        )
        return Ways(*by_room, said[bars:])

    def _of_steps(self, lengths: np.ndarray, draft: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens verified and said in a step, on average over the steps of all runs, float[ways].

        Args:
          lengths: int[ways, kinds, places], of the draft at each place of a run.
        """
        worth = np.pad(_ahead(self.reach, draft).cumsum(axis=2), ((0, 0), (0, 0), (1, 0)))
        kind = np.arange(KINDS)
        ways, places = len(lengths), lengths.shape[2]
        comes = np.zeros((ways, KINDS, places))
        comes[:, :, 0] = self.share
        steps, verified, said = (np.zeros(ways) for _ in range(3))
        for place in range(places):
            length = lengths[:, :, place]
            # All are right, and the token after them goes on with the run.
            then = np.minimum(place + length + 1, MOST)
            before = self.reach[kind, place]
            goes_on = np.divide(
                self.reach[kind, then], before, where=before > 0, out=np.zeros(then.shape)
            )
            here, last = comes[:, :, place], places - 1
            if place == last:  # further ones are as this one: see `lines.Runs.met_by`
                here = here / (1 - np.minimum(goes_on, MOST_GOES_ON))
            steps += here.sum(axis=1)
            verified += (here * length).sum(axis=1)
            said += (here * (1 + worth[kind, place, length])).sum(axis=1)
            at = np.arange(ways)[:, None], kind, np.minimum(place + length + 1, last)
            np.add.at(comes, at, here * goes_on)
        return verified / steps, said / steps
