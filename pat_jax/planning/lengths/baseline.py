"""The distribution of response lengths over all prompts: Kaplan-Meier in bins of log length.

Knows counts and hazards. Does not know prompts, iterations or what a plan is.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

BINS_PER_EFOLD = 128  # a bin is 0.8 % of a length; up to 128 tokens every length has its own
FIRST_TOKEN = 89  # the bin of one token: those before it reach down to half a token, "none yet"
PRIOR_TAIL = 2.0  # α before any long response ended
PRIOR_TAIL_EVENTS = 2.0  # ends in the tail that the prior α is worth
TAIL = 0.1  # the tail: what lies beyond the length that this share of responses exceeds


@dataclass(frozen=True)
class Baseline:
    """Counts of responses by the logarithm of their length.

    A response that was cut counts as still running at its length (censored), not as ended.

    The prior is `prior_weight` responses at every length that end with hazard α / max(t, τ) per
    token: constant up to τ, that of a power law beyond. It decides where nothing was observed.
    τ is `cap` at first and moves to the length that a tenth of the responses exceed. α is Hill's
    estimate from that tenth (Hill 1975), with its censored responses and a gamma prior.
    """

    ended: np.ndarray  # float64[bins], responses that ended in a bin
    cut: np.ndarray  # float64[bins], responses that were cut in a bin
    cap: int  # tokens; longer responses count as that long
    prior_weight: float = 2.0  # number of responses that the prior counts as

    @classmethod
    def empty(cls, cap: int, prior_weight: float = 2.0) -> "Baseline":
        return cls(np.zeros(_num_bins(cap)), np.zeros(_num_bins(cap)), cap, prior_weight)

    def with_cap(self, cap: int) -> "Baseline":
        """Returns the same counts under another cap. Responses that were cut stay cut at the length
        that they had."""
        more = 0, max(0, _num_bins(cap) - len(self.ended))
        return replace(self, ended=np.pad(self.ended, more), cut=np.pad(self.cut, more), cap=cap)

    def bins(self, lengths: np.ndarray) -> np.ndarray:
        """Returns the index of the bin of each length in tokens, int[...]."""
        tokens = np.clip(lengths, 0.5, self.cap)  # 0.5: no token yet
        return np.rint(BINS_PER_EFOLD * np.log(tokens)).astype(int) + FIRST_TOKEN

    def plus(self, lengths: np.ndarray, is_cut: np.ndarray, *, keep: float = 1.0) -> "Baseline":
        """Returns the counts times `keep`, with more responses: `lengths` in tokens,
        int[responses], and whether each was truncated, bool[responses]."""
        bins = self.bins(lengths)
        size = len(self.ended)
        return replace(
            self,
            ended=keep * self.ended + np.bincount(bins[~is_cut], minlength=size),
            cut=keep * self.cut + np.bincount(bins[is_cut], minlength=size),
        )

    @cached_property
    def at_risk(self) -> np.ndarray:
        """The number of responses that reached each bin, float64[bins]."""
        return (self.ended + self.cut)[::-1].cumsum()[::-1]

    @cached_property
    def empirical(self) -> np.ndarray:
        """P(beyond a bin), float64[bins]: Kaplan and Meier 1958, eq. 2b, without the prior."""
        return np.cumprod(1 - self.ended / np.where(self.at_risk > 0, self.at_risk, 1))

    @cached_property
    def log_survival(self) -> np.ndarray:
        """log P(beyond a bin), float64[bins]: Kaplan-Meier with the prior."""
        ended = self.ended + self.prior_weight * self._prior_hazard
        hazard = ended / (self.at_risk + self.prior_weight)
        return np.cumsum(np.log1p(-np.minimum(hazard, 1 - 1e-12)))

    @cached_property
    def _centres(self) -> np.ndarray:
        """The log length at the middle of each bin, float64[bins]."""
        return (np.arange(len(self.ended)) - FIRST_TOKEN) / BINS_PER_EFOLD

    @cached_property
    def _prior_hazard(self) -> np.ndarray:
        """The prior's probability that a response that reached a bin ends in it, float64[bins]."""
        start = self._tail_start
        in_tail = self._centres > start
        beyond = ((self.ended + self.cut) * (self._centres - start))[in_tail].sum()
        ends = PRIOR_TAIL_EVENTS + self.ended[in_tail].sum()
        tail = ends / (PRIOR_TAIL_EVENTS / PRIOR_TAIL + beyond)
        edges = (np.arange(len(self.ended) + 1) - FIRST_TOKEN - 0.5) / BINS_PER_EFOLD
        cumulative = np.exp(np.minimum(edges - start, 0)) + np.maximum(edges - start, 0)
        return -np.expm1(-tail * np.diff(cumulative))

    @cached_property
    def _tail_start(self) -> float:
        """log τ, the log length at which the tail begins."""
        prior = np.log(self.cap)
        ended = float(self.ended.sum())
        first = np.searchsorted(-self.empirical, -TAIL - 1e-12)
        if first == len(self.empirical):  # more than `TAIL` have not ended
            return float(prior)
        seen = self._centres[first]
        return float((self.prior_weight * prior + ended * seen) / (self.prior_weight + ended))


def _num_bins(cap: int) -> int:
    return FIRST_TOKEN + round(BINS_PER_EFOLD * np.log(cap)) + 1
