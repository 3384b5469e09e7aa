"""What uneven replicas have cost since they were last even: the rent that pays for a move within a
row bucket.

A move to a smaller row bucket pays for itself by what the plan says. Within a bucket replicas drift
apart again, so that what a move saves to the end, another one a little later would save as well. It
is due when so much was lost as it costs, as in `budget.py`, or will be in the next burst.
"""

from dataclasses import dataclass

import numpy as np

from pat_jax.planning.planner.costs import CostTables
from pat_jax.planning.types import Load, Split


@dataclass
class Unevenness:
    """How uneven the replicas of one rollout have been."""

    lost_s: float = 0.0
    next_s: float = 0.0  # that a burst as long as the last one would lose
    _split: Split | None = None
    _step: float = 0.0  # decode steps done when `_excess_s` was seen
    _steps: float = 0.0  # of the last burst
    _excess_s: float = 0.0  # of a step, over one of even replicas

    def see(self, load: Load, split: Split, tables: CostTables, factor: float) -> None:
        """What is about to run, in profiled seconds times `factor`."""
        steps = max(0.0, load.step - self._step)
        self.lost_s = self.lost_s + steps * self._excess_s if split == self._split else 0.0
        self._steps = steps or self._steps  # plans are made twice where sequences move
        fullest = int(np.bincount(load.replica).max())
        even = -(-load.running // split.dp)
        now_s, even_s = (step_seconds(tables, split, load, n) for n in (fullest, even))
        self._split, self._step = split, load.step
        self._excess_s = factor * max(0.0, now_s - even_s)
        self.next_s = self._steps * self._excess_s

    def moved(self) -> None:
        self.lost_s = self.next_s = self._excess_s = 0.0


def step_seconds(tables: CostTables, split: Split, load: Load, fullest: int) -> float:
    """Seconds of a decode step with so many sequences in the fullest replica, of average length."""
    rows = np.full((len(tables.splits), 1), float(fullest))
    context, mean = np.full_like(rows, load.context.max()), np.full_like(rows, load.context.mean())
    return float(tables.steps(rows, context, mean)[tables.splits.index(split), 0])


def is_within_bucket(tables: CostTables, before: np.ndarray, after: np.ndarray) -> bool:
    """Whether the fullest replica needs as many rows in either; int[running], replicas."""
    fullest = np.array([np.bincount(replica).max() for replica in (before, after)])
    return len(np.unique(np.searchsorted(tables.rows, fullest))) == 1
