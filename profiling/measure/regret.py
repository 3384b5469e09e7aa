"""What the path that a rollout took cost over the best one in hindsight.

Knows traces and prices. Does not know how the best path is found.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.trace import Balanced, RolloutTrace, Switch
from pat_jax.planning.planner.planner import CostModelPlanner, Planner
from pat_jax.planning.types import MIGRATE_ALL, Balance, Load, Plan, Sending, SendLimits, Split
from pat_jax.profiling.simulate.hindsight import clairvoyant
from pat_jax.profiling.simulate.machine import Machine, Workload
from pat_jax.profiling.simulate.simulator import replay


def regret(workload: Workload, machine: Machine, trace: RolloutTrace) -> float:
    """What a rollout's path took over the best path in hindsight, minus 1.

    Both are priced by `machine`, not by the clock: a noisy moment is no wrong decision.
    """
    splits = {str(split): split for split in machine.splits}
    path = tuple((splits[switch.target], switch) for switch in trace.switches)
    planner = _AsTaken(splits[trace.path[0]], path, trace.balanced, machine.check_every)
    taken = replay(workload, planner, machine)
    return taken.total_s / clairvoyant(workload, machine).total_s - 1


@dataclass(frozen=True)
class _AsTaken(Planner):
    """The switches and moves of a trace, each once as few sequences are live and as many steps done.

    Not by one of them alone: a switch may come because the cache has grown while nothing ended.
    """

    first: Split
    path: tuple[tuple[Split, Switch], ...]
    moves: tuple[Balanced, ...]  # between the groups of a layout
    slack: int  # steps by which a replayed burst may end earlier than the real one

    def start(self, load: Load) -> Split:
        del load
        return self.first

    def plan(self, load: Load, current: Split) -> Plan:
        del current
        done = self._switches_done(load)
        split, below = self.first, MIGRATE_ALL
        if done:
            split, below = self.path[done - 1][0], self.path[done - 1][1].recompute_below
        to_come = [switch.live // split.dp for _, switch in self.path[done:]]
        to_come += [move.fullest[0] for move in self._moves(done) if _begun(move) > load.step]
        return Plan(split, max(to_come, default=0), below)

    def balance(
        self, load: Load, plan: Plan, options: Sequence[np.ndarray], limits: SendLimits
    ) -> Balance | None:
        del plan
        fullest, step = _fullest(load.group), load.step + self.slack
        moves = self._moves(self._switches_done(load))
        due = [move for move in moves if _begun(move) <= step and fullest <= move.fullest[0]]
        least = min(due, key=lambda move: move.fullest[1], default=None)
        if not options or least is None or fullest <= least.fullest[1]:
            return None
        group = min(options, key=lambda group: abs(_fullest(group) - least.fullest[1]))
        if not least.steps_between:
            return Balance(group)
        return Balance(group, sending=Sending(limits.rounds, least.steps_between))

    def _switches_done(self, load: Load) -> int:
        step = load.step + self.slack
        return sum(load.live <= switch.live and switch.step <= step for _, switch in self.path)

    def _moves(self, done: int) -> list[Balanced]:
        """Moves between the last of so many switches and the next one."""
        steps = [0, *(switch.step for _, switch in self.path), math.inf]
        return [move for move in self.moves if steps[done] <= move.step <= steps[done + 1]]


def _begun(move: Balanced) -> int:
    """Decode steps done when its first stage began, or all of it."""
    return move.step - move.steps_between


def _fullest(group: np.ndarray) -> int:
    """Live sequences of the fullest group."""
    return int(np.bincount(group).max())


def planned_regret(
    planner: CostModelPlanner,
    config: RolloutConfig,
    sequences: np.ndarray,
    trace: RolloutTrace,
    *,
    capacity: int,
    expected: np.ndarray | None = None,
) -> float:
    """The regret of a rollout that `planner` planned, by its own prices.

    Layouts that have not run get no benefit of the doubt: hope that they are faster is a reason to
    try one, and no loss.

    Args:
      sequences: int[3, sequences], tokens of each one's prompt and response, and the prompt's id.
      expected: float[sequences], tokens of the responses as was believed when it began.
      capacity: the most sequences that the engine's buckets are made for.
    """
    correction = planner.latency.correction.soberly(planner.splits)
    machine = Machine.of(
        replace(planner.latency, correction=correction),
        planner.splits,
        config,
        capacity=capacity,
        memory=planner.memory,
        host_s_per_sequence=correction.per_sequence_s,
    )
    prompts, responses, prompt_id = sequences
    cap = config.max_completion_length
    return regret(Workload(prompts, responses, cap, prompt_id, expected), machine, trace)
