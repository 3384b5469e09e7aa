"""How long will it go on? The survival curve of response lengths, from the responses seen so far."""

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class LengthModel:
    """Kaplan-Meier with a prior and a half-life.

    A response that was cut at the cap counts as still running there (censored), not as ended. The
    prior is a constant hazard worth `prior_weight` responses at every length: it speaks where
    nothing has been seen.
    """

    ended: np.ndarray  # float64[cap + 1], responses that ended with exactly this many tokens
    cut: np.ndarray  # float64[cap + 1], responses cut there
    prior_weight: float = 2.0
    keep: float = 0.8  # weight of the past at each update: lengths drift while a policy learns

    @classmethod
    def empty(cls, cap: int) -> "LengthModel":
        return cls(np.zeros(cap + 1), np.zeros(cap + 1))

    @property
    def cap(self) -> int:
        return len(self.ended) - 1

    def updated(self, lengths: np.ndarray, is_cut: np.ndarray) -> "LengthModel":
        """With one more rollout's response lengths, int[responses], and whether each was cut."""

        def count(which: np.ndarray) -> np.ndarray:
            return np.bincount(np.minimum(lengths[which], self.cap), minlength=self.cap + 1)

        return replace(
            self,
            ended=self.keep * self.ended + count(~is_cut),
            cut=self.keep * self.cut + count(is_cut),
        )

    def log_survival(self) -> np.ndarray:
        """log P(length > t), float64[cap + 1] (Kaplan and Meier 1958, eq. 2b, with a prior)."""
        leaving = self.ended + self.cut
        at_risk = leaving[::-1].cumsum()[::-1]
        prior_hazard = 2.0 / max(self.cap, 1)
        hazard = (self.ended + self.prior_weight * prior_hazard) / (at_risk + self.prior_weight)
        return np.cumsum(np.log1p(-np.minimum(hazard, 1 - 1e-12)))

    def survival(
        self, generated: np.ndarray, budget: np.ndarray, moments: np.ndarray
    ) -> np.ndarray:
        """P(still live after `moments` more steps), float64[sequences, moments]."""
        log_survival = self.log_survival()  # live with t tokens means: longer than t
        later = np.minimum(generated[:, None] + moments[None, :], self.cap)
        alive = np.exp(log_survival[later] - log_survival[np.minimum(generated, self.cap)][:, None])
        return np.where(moments[None, :] < budget[:, None], alive, 0.0)

    def to_json(self) -> dict:
        return {"ended": self.ended.tolist(), "cut": self.cut.tolist()}

    @classmethod
    def from_json(cls, data: dict) -> "LengthModel":
        return cls(np.array(data["ended"], float), np.array(data["cut"], float))
