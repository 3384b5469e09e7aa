"""Seconds of a call between the points at which they were measured, and past the last of them.

Between points a step is a straight line in rows and in length: so it is in the physics below, and
the regime that it is in (which kernel, whose cache) is its neighbours'. Past the last point it grows
as the physics does that fits all points best.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.optimize import nnls

PRIOR = 0.05  # weight of equal parts against one measured point: decides where few points do not


@dataclass(frozen=True)
class Physics:
    """fixed + per_row · rows + per_token · rows · length, in seconds; no part is negative.

    fixed: launches, the weights read once, the latency of every layer's collectives.
    per_row: matrix products, sampling, the bytes of the collectives.
    per_token: the KV cache of each live token.
    """

    fixed: float
    per_row: float
    per_token: float

    @classmethod
    def fit(cls, points: Mapping[tuple[int, int], float]) -> "Physics":
        """The least squares of relative errors over {(rows, length): seconds}."""
        rows, lengths = np.array(list(points), float).T
        seconds = np.array(list(points.values()))
        parts = np.stack([np.ones_like(rows), rows, rows * lengths], axis=1)
        unit = parts.max(axis=0)  # one of each part at the largest load
        equal = PRIOR / seconds.max()
        weighted = np.concatenate([parts / unit / seconds[:, None], equal * np.eye(3)])
        target = np.concatenate([np.ones_like(seconds), np.full(3, equal * seconds.max() / 3)])
        solution, _ = nnls(weighted, target)
        return cls(*(solution / unit).tolist())

    def __call__(self, rows: float, length: float) -> float:
        return self.fixed + rows * (self.per_row + length * self.per_token)


class Surface:
    """Seconds over (rows, length), from the points where they are known."""

    def __init__(self, points: Mapping[tuple[int, int], float]):
        """
        Args:
          points: {(rows, length): seconds}, at least one; a grid of them may have holes.
        """
        self.points = points
        lines: dict[int, list[int]] = defaultdict(list)
        for rows, length in sorted(points):
            lines[rows].append(length)
        self._lines = dict(lines)  # known lengths by known rows, both ascending
        self.rows = list(self._lines)
        self.lengths = sorted({length for _, length in points})

    @cached_property
    def physics(self) -> Physics:
        return Physics.fit(self.points)

    def cover(self, rows: int, length: int) -> tuple[int, int]:
        """The bucket that a load of this size runs in; past the last bucket, the load itself."""
        return _cover(self.rows, rows), _cover(self.lengths, length)

    def __call__(self, rows: int, length: int) -> float:
        """Seconds of a bucket: as measured, or by its neighbours.

        A bucket below the smallest costs what the smallest costs.
        """
        if (rows, length) in self.points:
            return self.points[rows, length]
        return _between(
            rows, self.rows, lambda n: self._line(n, length), lambda n: self.physics(n, length)
        )

    def _line(self, rows: int, length: int) -> float:
        """With `rows` that have been measured, if not with this length."""
        return _between(
            length,
            self._lines[rows],
            lambda m: self.points[rows, m],
            lambda m: self.physics(rows, m),
        )


def _cover(steps: Sequence[int], needed: int) -> int:
    at = bisect_left(steps, needed)
    return steps[at] if at < len(steps) else needed


def _between(
    at: int,
    known: Sequence[int],
    seconds: Callable[[int], float],
    physics: Callable[[int], float],
) -> float:
    i = bisect_left(known, at)
    if i == len(known):
        return seconds(known[-1]) * physics(at) / physics(known[-1])
    if i == 0 or known[i] == at:
        return seconds(known[i])
    low, high = known[i - 1], known[i]
    share = (at - low) / (high - low)
    return (1 - share) * seconds(low) + share * seconds(high)
