"""The threshold rule that the planner is compared with; no part of the product."""

from dataclasses import dataclass

import numpy as np

from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.types import Load, Plan, Split


@dataclass(frozen=True)
class NaiveThreshold(Planner):
    """Doubles TP once two merging groups together hold `at` running sequences or fewer.

    The rule of verl's pull request 2158, from the lowest TP on; but it migrates, as the planner it
    is compared with may, where that one recomputes.
    """

    splits: tuple[Split, ...]  # lowest TP first
    at: int = 16

    def start(self, load: Load) -> Split:
        del load
        return self.splits[0]

    def decide(self, load: Load, current: Split, options=()) -> Plan:
        for wider in self.splits:
            if wider.tp == 2 * current.tp:
                merged = np.bincount(load.replica % wider.dp, minlength=wider.dp)
                if merged.max() <= self.at:
                    return Plan(wider, threshold=self.at // 2, reason="naive threshold")
        return Plan(current, threshold=self.at // 2, reason="naive threshold")
