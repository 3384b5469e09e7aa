"""Interpolates the seconds of a call between measured points, and extrapolates past the last one.

Between points the seconds are linear in rows and in length, as in `Physics`; the same kernels are
assumed as at the neighbouring points. Past the last point the seconds grow like the `Physics` that
fits all points best.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.optimize import nnls

Numbers = float | np.ndarray


def migration(
    source_dp: Numbers,
    target_dp: Numbers,
    everybody: Numbers,
    one: Numbers,
    fullest: Numbers,
    running: Numbers,
) -> Numbers:
    """Returns the seconds to migrate `running` sequences, each with the pages of one round. As long
    as every replica has pages to move, all move theirs in shared rounds of `everybody` seconds.
    Later sequences move one by one, in `one` seconds each (`engine/relocation/rounds.py`). Only the
    sequences of the fullest replica and their mean are known: the emptiest is taken to be as far
    below the mean as the fullest is above. If DP grows, each replica is taken to be split
    evenly."""
    replicas = np.maximum(source_dp, target_dp)
    mean = running / replicas
    alike = np.where(target_dp > source_dp, mean, np.maximum(0.0, 2 * mean - fullest))
    return alike * everybody + (running - replicas * alike) * one


PRIOR = 0.05  # weight of equal parts against one measured point: decides where points are too few


@dataclass(frozen=True)
class Physics:
    """fixed + per_row · rows + per_token · rows · length, in seconds; no part is negative.

    fixed: launches, the weights read once, the latency of every layer's collectives.
    per_row: matrix products, sampling, the bytes of the collectives.
    per_token: reading the KV cache of each token.
    """

    fixed: float
    per_row: float
    per_token: float

    @classmethod
    def fit(cls, points: Mapping[tuple[int, int], float]) -> "Physics":
        """Returns the fit with least squared relative errors over {(rows, length): seconds}."""
        rows, lengths = np.array(list(points), float).T
        seconds = np.array(list(points.values()))
        parts = np.stack([np.ones_like(rows), rows, rows * lengths], axis=1)
        unit = parts.max(axis=0)  # one of each part at the largest load
        equal = PRIOR / seconds.max()
        weighted = np.concatenate([parts / unit / seconds[:, None], equal * np.eye(3)])
        target = np.concatenate([np.ones_like(seconds), np.full(3, equal * seconds.max() / 3)])
        solution, _ = nnls(weighted, target)
        fixed, per_row, per_token = (solution / unit).tolist()
        return cls(fixed, per_row, per_token)

    def __call__(self, rows: float, length: float) -> float:
        return self.fixed + rows * (self.per_row + length * self.per_token)


class Surface:
    """Seconds over (rows, length), from the points where they are known."""

    def __init__(self, points: Mapping[tuple[int, int], float]):
        """`points`: {(rows, length): seconds}, at least one; a grid of them may have holes."""
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
        """Returns the bucket in which a load runs; past the last bucket, the load itself."""
        return _cover(self.rows, rows), _cover(self.lengths, length)

    def __call__(self, rows: int, length: float) -> float:
        """Returns the seconds of a bucket: as measured, or interpolated from its neighbours. A
        bucket below the smallest costs what the smallest costs."""
        at: tuple[int, Any] = rows, length  # of the bucket itself, mostly
        if at in self.points:
            return self.points[at]
        return _between(
            rows, self.rows, lambda n: self._line(n, length), lambda n: self.physics(n, length)
        )

    def reading(self, rows: int, longest: float, tokens: float) -> float:
        """Returns the seconds of a bucket of `rows` rows that hold `tokens` tokens together, each
        at most `longest`. This holds for kernels that read only the tokens in the cache. They take
        as long as for rows of average length, and at least as long as for the longest row alone, if
        that is known."""
        seconds = self._read(rows, tokens / rows)
        if self.rows[0] > 1:
            return seconds
        return max(seconds, self._read(1, min(longest, tokens)))

    def _read(self, rows: int, tokens: float) -> float:
        """Returns the seconds with `tokens` tokens in each row, by physics below known lengths."""
        if tokens >= self.lengths[0] or len(self.lengths) == 1:
            return self(rows, tokens)
        known = self(rows, self.lengths[0])
        return known * self.physics(rows, tokens) / self.physics(rows, self.lengths[0])

    def _line(self, rows: int, length: float) -> float:
        """Returns the seconds with `rows` rows, which were measured, at any length."""
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
    at: float,
    known: Sequence[int],
    seconds: Callable[[int], float],
    physics: Callable[[float], float],
) -> float:
    i = bisect_left(known, at)
    if i == len(known):
        return seconds(known[-1]) * physics(at) / physics(known[-1])
    if i == 0 or known[i] == at:
        return seconds(known[i])
    low = known[i - 1]
    high = known[i]
    share = (at - low) / (high - low)
    return (1 - share) * seconds(low) + share * seconds(high)
