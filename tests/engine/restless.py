"""A planner that never leaves sequences where they are."""

from dataclasses import dataclass, field, replace

import numpy as np

from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.planning.types import Load, Moved, Outcome, Plan, Split


@dataclass(frozen=True)
class Restless(FixedLayout):
    """Always moves a sequence of the fullest replica to the emptiest one."""

    moved: list[Plan] = field(default_factory=list)

    def decide(self, load: Load, current: Split, options=()) -> Plan:
        plan = super().decide(load, current, options)
        count = np.bincount(load.replica, minlength=plan.split.dp)
        if count.max() == count.min():
            return plan
        replica = load.replica.copy()
        replica[np.flatnonzero(replica == count.argmax())[0]] = count.argmin()
        return replace(plan, replica=replica)

    def observe(self, outcome: Outcome) -> None:
        if isinstance(outcome, Moved) and outcome.plan.replica is not None:
            self.moved.append(outcome.plan)
