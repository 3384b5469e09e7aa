"""What drafts are worth: how many of their tokens are accepted, as far as a run has seen it.

Knows counts. Does not know where drafts come from, nor what verifying them costs.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

# Matches of so many tokens and more are a kind of their own; shorter ones than the first are none.
MATCHES = (1, 2, 3, 5, 9, 16)
MOST = 32  # tokens of a draft
# Before a run has seen any. Counted on responses of seven models, which weigh the same (own text and
# siblings, all sets but codegen): `python -m benchmarks.draft_acceptance --data
# ../shared/data/speculation/dev.parquet` prints both. How often the first, second, ... token of a draft is
# right where those before it are, by the kind of match; further ones as often as the last.
PRIOR = (
    (0.26, 0.48, 0.58, 0.62, 0.66, 0.71, 0.73, 0.78),
    (0.42, 0.52, 0.60, 0.65, 0.68, 0.72, 0.73, 0.76),
    (0.48, 0.57, 0.63, 0.67, 0.71, 0.73, 0.76, 0.76),
    (0.55, 0.64, 0.69, 0.72, 0.75, 0.77, 0.78, 0.81),
    (0.73, 0.77, 0.79, 0.81, 0.83, 0.84, 0.85, 0.86),
    (0.90, 0.87, 0.89, 0.92, 0.92, 0.93, 0.94, 0.94),
)
PRIOR_KINDS = (0.129, 0.285, 0.224, 0.194, 0.099, 0.038, 0.031)  # of its steps, none first
PRIOR_STEPS = 30.0  # that it counts for, of each kind of match and each token of a draft
# Steps of single rows after which what was seen counts half: how often matches come changes from burst to
# burst, as texts grow and begin to repeat; how good they are with the prompt too. Of what was tried on the
# data of docs/figures.md, what foretold the next burst best (250 of 100 to never, 2,000 of 1,000 to 50,000).
KINDS_HALVE, RIGHT_HALVE = 250.0, 2_000.0
ROUNDS = 3  # of telling steps that begin runs from those that go on with one, each with what the last found
LEAST_BEGUN = 1e-6  # runs: what is met has begun somewhere

# What is counted of bursts that draft nothing: see `Acceptance.observed`, for each of one group.
NONE_DRAFTED = np.zeros((1, len(MATCHES) + 1, 1), np.int64)


def _prior_right() -> np.ndarray:
    """float[matches, MOST], how often each token of a draft is right where those before it are."""
    known = np.array([[0.0] * len(PRIOR[0]), *PRIOR])  # without a match there is no draft
    return np.pad(known, ((0, 0), (0, MOST - known.shape[1])), mode="edge")


def _kinds_at(places: np.ndarray) -> np.ndarray:
    """int[begun, places], the kind of match after so many more tokens; without one no run goes on."""
    lengths = np.array(MATCHES)[:, None] + places
    kind = np.searchsorted(MATCHES, lengths, side="right")
    return np.concatenate([np.zeros((1, len(places)), np.int64), kind])


def _odds(rate: np.ndarray) -> np.ndarray:
    return rate / (1.0 - rate)


@dataclass(frozen=True, eq=False)
class Acceptance:
    """How many tokens of drafts are right, by the kind of match that they come from.

    A *run* is what drafts without end would say at once. Which kinds of matches runs begin with, and
    P(token i of it is right | those before it are), say what any draft is worth: a step with a draft of n
    says n + 1 tokens of a run, the next one goes on from a match that is as much longer. So short drafts
    see more and longer matches than long ones do, and what was seen with one length holds for others.
    """

    tried: np.ndarray  # float[matches, MOST], drafts that came to each token
    right: np.ndarray  # float[matches, MOST], and whose token was right
    begun: np.ndarray  # float[matches], runs that began with a match of each kind, none first

    @classmethod
    def unseen(cls) -> "Acceptance":
        nothing = np.zeros((len(MATCHES) + 1, MOST))
        prior = cls(nothing, nothing, np.zeros(len(nothing)))
        begun = np.linalg.solve(prior._met(len(PRIOR[0])), PRIOR_STEPS * np.array(PRIOR_KINDS))
        return cls(nothing, nothing, begun)

    def observed(self, counts: np.ndarray) -> "Acceptance":
        """After a burst with drafts.

        Args:
          counts: int[matches, 1 + draft], steps of single rows by how many of the tokens were right.
        """
        steps = float(counts.sum())
        if not (steps and counts.shape[1] > 1):
            return self
        kept, kinds_kept = 0.5 ** (steps / RIGHT_HALVE), 0.5 ** (steps / KINDS_HALVE)
        after = self
        for _ in range(ROUNDS):
            tried, right = after.among(counts)._parts(counts)
            tried, right = kept * self.tried + tried, kept * self.right + right
            after = Acceptance(tried, right, kinds_kept * self.begun + after._begun_of(counts))
        return after

    def among(self, counts: np.ndarray) -> "Acceptance":
        """With the kinds of these steps alone, and matches as good as they were.

        Args:
          counts: see `observed`.
        """
        return Acceptance(self.tried, self.right, self._begun_of(counts))

    @cached_property
    def _reached(self) -> np.ndarray:
        """float[matches, 1 + MOST], P(the first tokens of a run are right), of none at first.

        Tokens that no draft had are as much better or worse than before a run has seen any as those are
        that one had.
        """
        prior = _prior_right()
        tried, right = self.tried.sum(axis=1), self.right.sum(axis=1)
        weight = self.tried + 1.0 / MOST
        expected = (weight * prior).sum(axis=1) / weight.sum(axis=1)
        seen = (right + PRIOR_STEPS * expected) / (tried + PRIOR_STEPS)
        better = np.divide(
            _odds(seen), _odds(expected), where=expected > 0, out=np.zeros(len(prior))
        )
        odds = better[:, None] * _odds(prior)
        rate = (self.right + PRIOR_STEPS * odds / (1 + odds)) / (self.tried + PRIOR_STEPS)
        return np.cumprod(np.pad(rate, ((0, 0), (1, 0)), constant_values=1.0), axis=1)

    def _met(self, draft: int) -> np.ndarray:
        """float[met, begun], steps with each kind of match in a run that began with each."""
        places = np.arange(0, 1 + MOST, 1 + draft)  # of a run, at which steps begin
        is_met = _kinds_at(places) == np.arange(len(self.begun))[:, None, None]
        return (is_met * self._reached[:, places]).sum(axis=2)

    def _parts(self, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of runs, by the kind that these began with, that steps have tried and that were right.

        A match that is met may begin a run or go on with one of another kind: each step counts for all
        that it may be a part of, as likely as it is.
        """
        draft = counts.shape[1] - 1
        places = np.arange(0, 1 + MOST - draft, 1 + draft)
        column = places[:, None] + np.arange(1 + draft)
        reached = self._reached[:, column]
        ends = reached - np.pad(reached, ((0, 0), (0, 0), (0, 1)))[:, :, 1:]
        likely = np.maximum(self.begun, LEAST_BEGUN)[:, None, None] * ends
        met = _kinds_at(places)
        all_likely = np.zeros(counts.shape)
        np.add.at(all_likely, met, likely)
        share = likely / np.maximum(all_likely, np.finfo(float).tiny)[met]
        # Of each number of tokens, the drafts with as many right, or more.
        reached = (share * counts[met])[:, :, ::-1].cumsum(axis=2)[:, :, ::-1]
        tried, right = np.zeros_like(self.tried), np.zeros_like(self.right)
        tried[:, column[:, :-1]] = reached[:, :, :-1]
        right[:, column[:, :-1]] = reached[:, :, 1:]
        return tried, right

    def _begun_of(self, counts: np.ndarray) -> np.ndarray:
        # Below zero by chance, where most steps go on: what later ones add makes up for it.
        return np.linalg.solve(self._met(counts.shape[1] - 1), counts.sum(axis=1).astype(float))

    def by_kind(self, draft: int) -> np.ndarray:
        """Tokens that a step with a draft of so many says, where its match begins a run, float[matches]."""
        return self._reached[:, : 1 + draft].sum(axis=1)

    def tokens(self, draft: int) -> float:
        """Tokens that a step says, over all kinds as often as they come now; 1 without a draft."""
        begun = np.maximum(self.begun, 0.0)
        said, steps = self.by_kind(MOST), self._reached[:, :: 1 + draft].sum(axis=1)
        return float(begun @ said / (begun @ steps))


@dataclass(frozen=True)
class Drafted:
    """What came of the drafts of a burst."""

    counts: np.ndarray  # int[matches, 1 + draft], see `Acceptance.observed`
