"""What drafts are worth: how many of their tokens are accepted, as far as a run has seen it.

Knows counts. Does not know where drafts come from, nor what verifying them costs.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

Numbers = float | np.ndarray
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


class Drafted(NamedTuple):
    """What came of the drafts of a burst, by the kind of match that they come from."""

    matched: np.ndarray  # int[matches], steps of single rows, with none first
    tried: (
        np.ndarray
    )  # int[matches, draft], drafts that were right up to each token, and had it verified
    right: np.ndarray  # int[matches, draft], and were right there too

    @property
    def verified(self) -> int:
        """Tokens of drafts, as far as they were right, and the first that was not."""
        return int(self.tried.sum())


# Of the one group of a burst that drafts nothing.
NONE_DRAFTED = Drafted(
    np.zeros((1, len(MATCHES) + 1), np.int64), *[np.zeros((1, len(MATCHES) + 1, 0), np.int64)] * 2
)


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

    Learned as P(token i is right | those before it are), of each kind, and how often each kind comes.
    """

    tried: np.ndarray  # float[matches, MOST], drafts that came to each token
    right: np.ndarray  # float[matches, MOST], and whose token was right
    kinds: np.ndarray  # float[matches], steps of each kind, none first

    @classmethod
    def unseen(cls) -> "Acceptance":
        tried = np.full((len(MATCHES) + 1, MOST), PRIOR_STEPS)
        return cls(tried, PRIOR_STEPS * _prior_right(), PRIOR_STEPS * np.array(PRIOR_KINDS))

    def observed(self, drafted: Drafted) -> "Acceptance":
        """After a burst with drafts."""
        steps, draft = float(drafted.matched.sum()), drafted.tried.shape[1]
        kept = 0.5 ** (steps / RIGHT_HALVE)
        tried, right = kept * self.tried, kept * self.right
        tried[:, :draft] += drafted.tried
        right[:, :draft] += drafted.right
        kinds = 0.5 ** (steps / KINDS_HALVE) * self.kinds + drafted.matched
        return Acceptance(tried, right, kinds)

    @cached_property
    def _worth(self) -> np.ndarray:
        return np.cumprod(self.right / self.tried, axis=1)

    def worth(self, draft: int) -> np.ndarray:
        """How likely each of the first tokens of a draft is right, those before it included,
        float[matches, draft]."""
        return self._worth[:, :draft]

    @property
    def share(self) -> np.ndarray:
        """Of the steps, how many have each kind of match, float[matches]."""
        return self.kinds / self.kinds.sum()

    def tokens(self, budget: Numbers, draft: int, rows: Numbers) -> Numbers:
        """What a row is expected to say in a step, 1 without drafts: see `verified`."""
        worth = self.worth(draft)
        said = self.verified(budget, draft, rows, worth) * worth
        return 1.0 + said.sum(axis=-1) @ self.share

    def verified(self, budget: Numbers, draft: int, rows: Numbers, worth: np.ndarray) -> np.ndarray:
        """How many of the drafts have each of their tokens verified, float[..., matches, draft].

        The room goes to the tokens that are likeliest right. Of many rows, each kind of match is there as
        often as it comes; a row alone has one kind, whatever it is worth. In between lies what is
        between.

        Args:
          budget: tokens of drafts that a step has room for, for each row; one number or several, [...].
          draft: most tokens of one draft.
          rows: that share the room, [...].
          worth: how likely each is right, as is believed, float[matches, draft].
        """
        room, rows = np.asarray(budget, float)[..., None], np.asarray(rows)[..., None, None]
        order = np.argsort(-worth, axis=None, kind="stable")  # of a draft, the first token first
        mass = np.repeat(self.share, draft)[order]
        left = np.clip(room - (np.cumsum(mass) - mass), 0, mass)
        together = np.zeros(left.shape)
        together[..., order] = left / np.where(mass > 0, mass, 1.0)
        together = together.reshape(*left.shape[:-1], *worth.shape)
        alone = np.clip(np.minimum(room, draft) - np.arange(draft), 0, 1)[..., None, :]
        return np.where(worth > 0, together + (alone - together) / np.maximum(rows, 1.0), 0.0)
