"""One planner for all processes: the first decides."""

from collections.abc import Sequence

import numpy as np

from pat_jax.common.hosts.together import process_group
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.types import Load, Outcome, Plan, Split


class AgreedPlanner(Planner):
    """Carries out the decisions of the first process's `planner` in every process.

    All processes have the same load, but measure different times, and so might plan differently.
    """

    def __init__(self, planner: Planner):
        self._planner = planner

    def start(self, load: Load) -> Split:
        return process_group().agree("first layout", lambda: self._planner.start(load))

    def decide(self, load: Load, current: Split, options: Sequence[np.ndarray] = ()) -> Plan:
        return process_group().agree("plan", lambda: self._planner.decide(load, current, options))

    def observe(self, outcome: Outcome) -> None:
        if process_group().is_first:  # the other processes' planners have made no decision
            self._planner.observe(outcome)

    @property
    def expects(self) -> LengthModel | None:
        return self._planner.expects

    def observe_rollout(self, lengths: LengthModel) -> None:
        self._planner.observe_rollout(lengths)
