"""Predicts what switches cost: the profile's seconds, corrected by switches that have run.

Knows seconds and layouts. Does not know what a switch is for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pat_jax.planning.types import Carry, Prediction, Split

MOST_SEEN = 32  # switches remembered: older ones say little, and the fit stays small
NOISE = 0.2  # standard deviation between like switches, as a share of the profiled seconds
FADING = 0.1  # how much noisier a remembered switch gets with each rollout
OWN = 0.5  # prior standard deviation of `pair` and of `way`; that of `common` is 1
SHORTEST = 1e-6  # seconds: a host's clock cannot measure less
LEAST = 0.2  # share of the profiled seconds: predictions never fall below it


@dataclass(frozen=True)
class SeenSwitch:
    """One switch that has run: its profiled and its measured seconds."""

    source: Split
    target: Split
    carry: Carry
    reshard_s: float  # of its weights, by the profile
    kv_s: float  # of its KV cache, by the profile
    actual_s: float  # measured
    age: int = 0  # rollouts since the switch

    @classmethod
    def of(cls, predicted: Prediction, carry: Carry, seconds: float) -> "SeenSwitch":
        """Returns the record of a switch that was predicted, took `seconds` and carried the cache
        by `carry`."""
        return cls(
            predicted.source, predicted.target, carry, predicted.reshard_s, predicted.kv_s, seconds
        )

    @property
    def profile_s(self) -> float:
        return self.reshard_s + self.kv_s


@dataclass(frozen=True)
class SwitchCosts:
    """actual = extra + (1 + common + pair) x reshard + (1 + common + way) x KV, fitted to switches.

    All switches share `extra` (seconds: draining, launching, the host) and `common` (bandwidth, a
    busy machine). `pair` belongs to one source and target, `way` to migrating or to recomputing.
    All have normal priors around 0: Bayesian linear regression in its dual form (Rasmussen &
    Williams 2006, eq. 2.12). Nine tenths of the first switch's error go to the shared parts; a
    switch of another size separates the parts.
    """

    seen: tuple[SeenSwitch, ...] = ()

    def observed(self, switch: SeenSwitch) -> "SwitchCosts":
        return SwitchCosts((*self.seen, switch)[-MOST_SEEN:])

    def aged(self) -> "SwitchCosts":
        """Returns the costs a rollout later: old switches weigh less, the profile more."""
        return SwitchCosts(tuple(replace(one, age=one.age + 1) for one in self.seen))

    def reshard(self, splits: Sequence[Split], profile_s: np.ndarray) -> np.ndarray:
        """Returns predicted seconds to reshard, float[from, to], with `extra`, which all switches
        have. `profile_s` has the profiled seconds, float[from, to], 0 only on the diagonal."""
        if not self.seen:
            return profile_s
        factor = np.full_like(profile_s, 1 + self._common)
        for one, weight in zip(self.seen, self._weights, strict=True):
            at = splits.index(one.source), splits.index(one.target)
            factor[at] += OWN**2 * one.reshard_s * weight
        believed = np.maximum(LEAST * profile_s, factor * profile_s + self._extra)
        return np.where(profile_s > 0, believed, 0.0)

    def kv(self, carry: Carry) -> float:
        """Returns the predicted / profiled seconds of carrying the KV cache by `carry`."""
        if not self.seen:
            return 1.0
        own = sum(
            OWN**2 * one.kv_s * float(weight)
            for one, weight in zip(self.seen, self._weights, strict=True)
            if one.carry == carry
        )
        return max(LEAST, 1 + self._common + own)

    def pages(self, profile_s: float) -> float:
        """Returns the predicted seconds of a move of pages alone, which the profile has as
        `profile_s`."""
        if not self.seen:
            return profile_s
        return max(LEAST * profile_s, self.kv("migrate") * profile_s + self._extra)

    @property
    def ways(self) -> tuple[float, float]:
        """The predicted / profiled seconds of migrating, and those of recomputing."""
        return self.kv("migrate"), self.kv("recompute")

    @cached_property
    def _profile_s(self) -> np.ndarray:
        return np.array([one.profile_s for one in self.seen])

    @property
    def _size(self) -> float:
        """Prior standard deviation of `extra`, seconds: the mean profiled cost of a switch."""
        return float(self._profile_s.mean())

    @property
    def _extra(self) -> float:
        """Seconds that every switch takes in addition to moving bytes."""
        return float(self._size**2 * self._weights.sum())

    @property
    def _common(self) -> float:
        return float(self._profile_s @ self._weights)

    @cached_property
    def _weights(self) -> np.ndarray:
        """The weight of each past switch, float[seen]: inverse covariance times excess seconds."""
        seen = self.seen
        profile_s = self._profile_s
        reshard_s, kv_s = np.array([(one.reshard_s, one.kv_s) for one in seen]).T
        pairs = [(one.source, one.target) for one in seen]
        ways = [one.carry for one in seen]
        same_pair, same_way = (np.array([[a == b for b in x] for a in x]) for x in (pairs, ways))
        covariance = self._size**2 + np.outer(profile_s, profile_s)
        covariance += OWN**2 * same_pair * np.outer(reshard_s, reshard_s)
        covariance += OWN**2 * same_way * np.outer(kv_s, kv_s)
        fading = 1 + FADING * np.array([one.age for one in seen])
        noise = NOISE * np.maximum(profile_s, SHORTEST) * fading
        excess = np.array([one.actual_s for one in seen]) - profile_s
        return np.linalg.solve(covariance + np.diag(noise**2), excess)
