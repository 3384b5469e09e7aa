"""Estimates how far a profile's step times are from those that a run measures.

Knows measured and profiled seconds of bursts. Knows neither what a step does nor the planner.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pat_jax.planning.types import Split

FACTOR_SPREAD = 0.15  # standard deviation of a layout's factor before its first burst
SHARED_SPREAD_S = 50e-6  # standard deviation of the shared term at first: the host's microseconds
NOISE = 0.1  # standard deviation of a burst's seconds, as a share of them
DRIFT = 0.02  # standard deviation of the change of a layout's factor between its bursts
ODD = 1.5  # standard deviations; a burst further from what was expected counts as this far
MOST = 2.0  # largest factor; a machine further than this from its profile needs a new profile


@dataclass(frozen=True, eq=False)
class Correction:
    """measured = factor[split] · profiled + per_sequence_s · running, in seconds of a step.

    The seconds that every layout takes for each running sequence (above all the host's work) are a
    term of their own. As part of a factor they would outlive the sequences: a layout that ran with
    many of them would look slow when few are left. A constant term could not be distinguished from
    the factors: when few sequences are left, most of a step is constant as well.

    A Kalman filter (Harvey 1989, section 3.2) of the ratio of measured to profiled time estimates
    both. At first the term takes nearly all of a surprise, which favours no layout. As sequences
    end, the term must fall with them; what remains is put down to the layout. Surprises are
    clipped (Masreliez and Martin 1977); the third in a row to the same side is believed.
    """

    splits: tuple[Split, ...] = ()  # layouts of the bursts so far
    mean: np.ndarray = field(default_factory=lambda: np.zeros(1))  # shared term, then factors
    covariance: np.ndarray = field(default_factory=lambda: np.zeros((1, 1)))
    odd: int = 0  # bursts in a row that were further off than `ODD`; negative: faster ones

    @property
    def per_sequence_s(self) -> float:
        """Seconds of each step for each running sequence of all replicas, in every layout."""
        return float(self.mean[0])

    @cached_property
    def factors(self) -> dict[Split, float]:
        """The factor of each layout that has run a burst."""
        return dict(zip(self.splits, self.mean[1:].tolist(), strict=True))

    def factor(self, split: Split) -> float:
        """Returns the measured / profiled seconds of a step, without the term that all layouts
        share. A layout not seen yet gets the benefit of the doubt. It is predicted to be faster
        than its profile by half of the other layouts' error (root mean square), or by their whole
        mean error if that is faster. If their profile is right, the factor is 1."""
        if split in self.factors or not self.splits:
            return self.factors.get(split, 1.0)
        errors = np.log(self.mean[1:])
        return float(np.exp(min(errors.mean(), -0.5 * np.sqrt((errors**2).mean()))))

    def sober_factors(self, splits: Sequence[Split]) -> np.ndarray:
        """Returns the measured / profiled seconds of a step in each layout, float[splits]. A layout
        not seen yet gets the others' mean factor: to try it costs one or two switches."""
        typical = float(np.exp(np.log(self.mean[1:]).mean())) if self.splits else 1.0
        return np.array([self.factors.get(split, typical) for split in splits])

    def observed(
        self, split: Split, running: int, profiled_s: float, seconds: float
    ) -> "Correction":
        """Returns the correction after a burst whose steps took `seconds` each. The profile
        predicts `profiled_s` for them."""
        load = running / profiled_s
        splits, mean, covariance = self._with(split)
        at = 1 + splits.index(split)
        covariance[at, at] += DRIFT**2
        seen = np.zeros(len(mean))
        seen[0] = load
        seen[at] = 1.0
        expected = float(seen @ mean)
        noise = (NOISE * expected) ** 2
        surprise = seconds / profiled_s - expected
        limit = ODD * math.sqrt(seen @ covariance @ seen + noise)
        odd = 0
        if abs(surprise) > limit:
            side = int(math.copysign(1, surprise))
            odd = self.odd + side if side * self.odd > 0 else side
            if abs(odd) > 2:
                covariance[at, at] += min(surprise**2, 1.0)  # it has changed
            else:
                surprise = side * limit
        gain = covariance @ seen / (seen @ covariance @ seen + noise)
        mean = mean + gain * surprise
        covariance = covariance - np.outer(gain, seen @ covariance)
        if mean[0] < 0:  # the term cannot be negative: what is faster is put down to the layout
            mean = mean - covariance[:, 0] * (mean[0] / covariance[0, 0])
        mean[1:] = np.clip(mean[1:], 1 / MOST, MOST)
        return Correction(splits, mean, covariance, odd)

    def _with(self, split: Split) -> tuple[tuple[Split, ...], np.ndarray, np.ndarray]:
        """Returns the estimate with `split`; a new layout begins with the others' mean factor."""
        if split in self.splits:
            return self.splits, self.mean, self.covariance.copy()
        mean = np.append(self.mean, 1.0)
        covariance = np.pad(self.covariance, (0, 1))
        covariance[-1, -1] = FACTOR_SPREAD**2
        if self.splits:
            mean[-1] = np.exp(np.log(self.mean[1:]).mean())
        else:
            covariance[0, 0] = SHARED_SPREAD_S**2
        return (*self.splits, split), mean, covariance
