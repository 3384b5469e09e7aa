"""The distribution of response lengths with nothing known of a prompt: Kaplan-Meier in log time.

Knows counts and hazards. Does not know prompts, iterations or what a plan is.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy.special import ndtri

BINS_PER_EFOLD = 128  # a bin is 0.8 % of a length; up to 128 tokens every length has its own
PRIOR_TAIL = 2.0  # α before any long response was seen
PRIOR_TAIL_EVENTS = 2.0  # ends in the tail that the prior α is worth
TAIL = 0.1  # the tail: what lies beyond the length that this share of responses exceeds
MATCHED = np.linspace(0.1, 0.9, 17)  # quantiles by which two distributions are aligned
SMALLEST = 1e-300  # survival below this is not told apart


@dataclass(frozen=True)
class Baseline:
    """Counts of responses by the logarithm of their length less a `level`, log tokens.

    A response that was cut counts as still running there (censored), not as ended. A level moves
    the whole distribution along the axis of log length (accelerated failure time), so that
    responses of iterations with different levels are counted together.

    The prior is `prior_weight` responses at every length that end with a hazard of α / max(t, τ) a
    token: constant at first, a power law's beyond. It speaks where nothing was seen. τ is `cap` at
    first and moves to the length that a tenth of the responses exceed; α is Hill's estimate from
    those (Hill 1975), with the censored ones among them and a gamma prior.
    """

    ended: np.ndarray  # float64[bins], responses that ended in a bin
    cut: np.ndarray  # float64[bins], responses cut there
    cap: int  # tokens; longer responses count as that long
    prior_weight: float = 2.0  # responses

    @classmethod
    def empty(cls, cap: int, prior_weight: float = 2.0) -> "Baseline":
        bins = 2 * _reach(cap) + 1
        return cls(np.zeros(bins), np.zeros(bins), cap, prior_weight)

    def with_cap(self, cap: int) -> "Baseline":
        """The same responses where the most tokens of one are others: those cut stay cut where
        they were.
        """
        room = np.pad(self.ended, more := max(0, _reach(cap) - len(self.ended) // 2))
        return replace(self, ended=room, cut=np.pad(self.cut, more), cap=cap)

    def bins(self, lengths: np.ndarray, level: float) -> np.ndarray:
        """int[...]: the bin of each length, int[...] tokens."""
        tokens = np.clip(lengths, 0.5, self.cap)  # 0.5: no token yet
        place = np.rint(BINS_PER_EFOLD * (np.log(tokens) - level)).astype(int)
        return np.clip(place + len(self.ended) // 2, 0, len(self.ended) - 1)

    def faded(self, keep: float) -> "Baseline":
        """The past counts `keep` times as much."""
        return replace(self, ended=keep * self.ended, cut=keep * self.cut)

    def plus(self, lengths: np.ndarray, is_cut: np.ndarray, level: float) -> "Baseline":
        """The counts with more responses: int[responses] tokens, bool[responses], and their level."""
        bins, size = self.bins(lengths, level), len(self.ended)
        return replace(
            self,
            ended=self.ended + np.bincount(bins[~is_cut], minlength=size),
            cut=self.cut + np.bincount(bins[is_cut], minlength=size),
        )

    @cached_property
    def at_risk(self) -> np.ndarray:
        """float64[bins], responses that reached each bin."""
        return (self.ended + self.cut)[::-1].cumsum()[::-1]

    @cached_property
    def empirical(self) -> np.ndarray:
        """P(beyond a bin), float64[bins]: Kaplan and Meier 1958, eq. 2b, and no prior."""
        return np.cumprod(1 - self.ended / np.where(self.at_risk > 0, self.at_risk, 1))

    @cached_property
    def log_survival(self) -> np.ndarray:
        """log P(beyond a bin), float64[bins]: Kaplan-Meier with the prior."""
        ended = self.ended + self.prior_weight * self._prior_hazard
        hazard = ended / (self.at_risk + self.prior_weight)
        return np.cumsum(np.log1p(-np.minimum(hazard, 1 - 1e-12)))

    @cached_property
    def scores(self) -> np.ndarray:
        """The normal score of living beyond a bin, float64[bins]: z with Φ(-z) = survival."""
        survival = np.exp(self.log_survival)
        return -ndtri(np.clip(survival, SMALLEST, 1 - 1e-16))

    @cached_property
    def end_scores(self) -> np.ndarray:
        """The normal score of ending in a bin, float64[bins]: of the middle of its probability."""
        survival = np.exp(self.log_survival)
        before = np.concatenate([[1.0], survival[:-1]])
        return -ndtri(np.clip((survival + before) / 2, SMALLEST, 1 - 1e-16))

    @cached_property
    def scale(self) -> float:
        """Half of the range of log length that holds the middle 68 %; 1 where that is not known."""
        low, high = self.quantiles(np.array([0.16, 0.84]))
        return float(high - low) / 2 if np.isfinite(high - low) else 1.0

    def quantiles(self, probabilities: np.ndarray) -> np.ndarray:
        """Log lengths (less their level) by which that share has ended, float64[probabilities].

        NaN where so many were never seen to end.
        """
        first = np.searchsorted(-self.empirical, probabilities - 1 - 1e-12)
        found = first < len(self.empirical)
        return np.where(found, self._centres[np.minimum(first, len(self.ended) - 1)], np.nan)

    def shift_to(self, other: "Baseline") -> float | None:
        """How much longer `other` is, log tokens; None where they have no quantile in common.

        The mean distance of the quantiles that both know: censored ones do not bias it.
        """
        distance = other.quantiles(MATCHED) - self.quantiles(MATCHED)
        known = np.isfinite(distance)
        return float(distance[known].mean()) if known.any() else None

    @cached_property
    def _centres(self) -> np.ndarray:
        """float64[bins], log length less its level."""
        return (np.arange(len(self.ended)) - len(self.ended) // 2) / BINS_PER_EFOLD

    @cached_property
    def _prior_hazard(self) -> np.ndarray:
        """float64[bins], the prior's probability of ending in a bin, once there."""
        start = self._tail_start
        in_tail = self._centres > start
        beyond = ((self.ended + self.cut) * (self._centres - start))[in_tail].sum()
        ends = PRIOR_TAIL_EVENTS + self.ended[in_tail].sum()
        tail = ends / (PRIOR_TAIL_EVENTS / PRIOR_TAIL + beyond)
        edges = (np.arange(len(self.ended) + 1) - len(self.ended) // 2 - 0.5) / BINS_PER_EFOLD
        cumulative = np.exp(np.minimum(edges - start, 0)) + np.maximum(edges - start, 0)
        return -np.expm1(-tail * np.diff(cumulative))

    @cached_property
    def _tail_start(self) -> float:
        """log τ, less the level."""
        prior, ended = np.log(self.cap), float(self.ended.sum())
        seen = self.quantiles(np.array([1 - TAIL]))[0]
        if not np.isfinite(seen):
            return float(prior)
        return float((self.prior_weight * prior + ended * seen) / (self.prior_weight + ended))


def _reach(cap: int) -> int:
    """Bins on either side of the middle: any length at any level between 1 and the cap."""
    return int(np.ceil(BINS_PER_EFOLD * (np.log(cap + 1) + 1)))
