"""What drafts are worth: how many of their tokens are accepted, as far as a run has seen it.

Knows counts. Does not know where drafts come from, nor what verifying them costs.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

# Matches of so many tokens and more are a kind of their own; shorter ones than the first are none.
MATCHES = (1, 2, 3, 5, 9, 16)
MOST = 32  # tokens of a draft
# How often the token behind a match of so many tokens is right, before a run has seen any: counted in
# responses of reasoning models (`python -m benchmarks.draft_acceptance`). A draft that has been right so
# far is a match that is longer.
PRIOR = {1: 0.25, 2: 0.42, 3: 0.48, 4: 0.53, 5: 0.58, 7: 0.65, 9: 0.71, 13: 0.77, 16: 0.84}
PRIOR_STEPS = 30.0  # that it counts for, of each kind of match and each token of a draft
PRIOR_KINDS = (0.10, 0.26, 0.18, 0.16, 0.12, 0.08, 0.10)  # of the steps, none first
# Steps of single rows after which what was seen counts half: how often matches come changes within a
# rollout, as texts grow; how good they are with the policy.
KINDS_HALVE, RIGHT_HALVE = 2_000.0, 50_000.0


# What is counted of bursts that draft nothing: see `Acceptance.observed`, for each of one group.
NONE_DRAFTED = np.zeros((1, len(MATCHES) + 1, 1), np.int64)


def _prior_right() -> np.ndarray:
    """float[matches, MOST], how often each token of a draft is right where those before it are."""
    known = sorted(PRIOR)
    lengths = np.array([0, *MATCHES])[:, None] + np.arange(MOST)[None]
    at = np.searchsorted(known, lengths, side="right") - 1
    rates = np.array([PRIOR[n] for n in known])[np.maximum(at, 0)]
    rates[0] = 0.0  # without a match there is no draft
    return rates


@dataclass(frozen=True, eq=False)
class Acceptance:
    """How many tokens of drafts are right, by the kind of match that they come from.

    Learned as P(token i is right | those before it are), of each kind; what a step says with a draft is
    the mean over the kinds as often as they come now.
    """

    tried: np.ndarray  # float[matches, MOST], drafts that came to each token
    right: np.ndarray  # float[matches, MOST], and whose token was right
    kinds: np.ndarray  # float[matches], steps of each kind, none first

    @classmethod
    def unseen(cls) -> "Acceptance":
        tried = np.full((len(MATCHES) + 1, MOST), PRIOR_STEPS)
        return cls(tried, PRIOR_STEPS * _prior_right(), PRIOR_STEPS * np.array(PRIOR_KINDS))

    def observed(self, counts: np.ndarray) -> "Acceptance":
        """After a burst with drafts.

        Args:
          counts: int[matches, 1 + draft], steps of single rows by how many of the tokens were right.
        """
        steps, draft = float(counts.sum()), counts.shape[1] - 1
        if not (steps and draft):
            return self
        kept = 0.5 ** (steps / RIGHT_HALVE)
        tried, right = kept * self.tried, kept * self.right
        # Of each number of tokens, the drafts with as many right, or more.
        reached = counts[:, ::-1].cumsum(axis=1)[:, ::-1]
        tried[:, :draft] += reached[:, :-1]
        right[:, :draft] += reached[:, 1:]
        kinds = 0.5 ** (steps / KINDS_HALVE) * self.kinds + counts.sum(axis=1)
        return Acceptance(tried, right, kinds)

    @cached_property
    def _right_so_far(self) -> np.ndarray:
        """float[matches, MOST], P(the first tokens of a draft up to this one are right)."""
        return np.cumprod(self.right / self.tried, axis=1)

    def by_kind(self, draft: int) -> np.ndarray:
        """Tokens that a step with a draft of so many is expected to say, float[matches]."""
        return 1.0 + self._right_so_far[:, :draft].sum(axis=1)

    def tokens(self, draft: int) -> float:
        """The same over all kinds, as often as they come now; 1 without a draft."""
        return float(self.kinds @ self.by_kind(draft) / self.kinds.sum())


@dataclass(frozen=True)
class Drafted:
    """What came of the drafts of a burst."""

    counts: np.ndarray  # int[matches, 1 + draft], see `Acceptance.observed`
