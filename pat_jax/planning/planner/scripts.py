"""Planners that do not plan: they stay in one layout, or follow a given path."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.types import MIGRATE_ALL, Load, Plan, Split


class Step(NamedTuple):
    """A script's step: go to `split` once `running` or fewer sequences are unfinished."""

    split: Split
    running: int
    recompute_below: int = MIGRATE_ALL  # see Plan


@dataclass(frozen=True)
class ScriptedPath(Planner):
    """Begins in the layout `first`, and switches at each step of a script."""

    first: Split
    steps: tuple[Step, ...] = ()
    num_draft_tokens: int = 0  # per row and step, see Plan
    accept_prob: np.ndarray | None = None
    reason: str = "scripted"

    def start(self, load: Load) -> Split:
        del load
        return self.first

    def decide(self, load: Load, current: Split, options: Sequence[np.ndarray] = ()) -> Plan:
        del current, options
        due = [step for step in self.steps if load.unfinished <= step.running]
        to_come = [step.running for step in self.steps if load.unfinished > step.running]
        now = due[-1] if due else Step(self.first, 0)
        # End the burst once the total may be reached, by the fullest replica.
        threshold = max(to_come, default=0) // now.split.dp
        return Plan(
            now.split,
            threshold,
            now.recompute_below,
            reason=self.reason,
            num_draft_tokens=self.num_draft_tokens,
            accept_prob=self.accept_prob,
        )


@dataclass(frozen=True)
class FixedLayout(ScriptedPath):
    """Stays in the layout `first`."""

    reason: str = "pinned"
