"""How the level of response lengths moves over iterations: they grow while a policy learns."""

from dataclasses import dataclass

import numpy as np

LEVEL_STEP = 0.03  # standard deviation of the level's own moves, log tokens an iteration
SLOPE_STEP = 0.003  # and of its slope's
FIRST_SLOPE = 0.02  # what a slope may be before anything was seen
JUMP = 2.5  # standard deviations; a level further off than that has jumped, and says nothing of a slope
MAX_SLOPE = 0.1  # log tokens an iteration: ten iterations for a factor of e


@dataclass(frozen=True)
class LengthTrend:
    """A local linear trend, followed by a Kalman filter (Harvey 1989, section 2.3.2).

    `level` is that of the iteration to come, in log tokens; the first iteration seen defines 0.
    """

    level: float = 0.0
    slope: float = 0.0  # log tokens an iteration
    level_variance: float = 1.0
    covariance: float = 0.0
    slope_variance: float = FIRST_SLOPE**2

    def observed(self, level: float, variance: float) -> "LengthTrend":
        """The trend after one iteration's measured level, whose variance is `variance`."""
        surprise, level_variance = level - self.level, self.level_variance
        if surprise**2 > JUMP**2 * (level_variance + variance):
            level_variance += surprise**2
        total = level_variance + variance
        gain, slope_gain = level_variance / total, self.covariance / total
        return LengthTrend(
            self.level + gain * surprise,
            float(np.clip(self.slope + slope_gain * surprise, -MAX_SLOPE, MAX_SLOPE)),
            (1 - gain) * level_variance,
            (1 - gain) * self.covariance,
            self.slope_variance - slope_gain * self.covariance,
        )

    def next(self, largest: float) -> "LengthTrend":
        """One iteration on, the level no farther from 0 than `largest`."""
        return LengthTrend(
            float(np.clip(self.level + self.slope, -largest, largest)),
            self.slope,
            self.level_variance + 2 * self.covariance + self.slope_variance + LEVEL_STEP**2,
            self.covariance + self.slope_variance,
            self.slope_variance + SLOPE_STEP**2,
        )
