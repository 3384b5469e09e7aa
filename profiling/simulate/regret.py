"""How much longer a rollout's path of layouts takes than the oracle's path.

Knows traces and prices. Does not know how the best path is found.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pat_jax.engine.record.trace import Move, RolloutTrace
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.types import MIGRATE_ALL, Load, Plan, Split
from pat_jax.profiling.simulate.machine import Machine, Workload
from pat_jax.profiling.simulate.oracle import Oracle, oracle
from pat_jax.profiling.simulate.simulator import replay


@dataclass(frozen=True)
class Regret:
    """The seconds of a rollout's path of layouts, and the oracle's path.

    Both are priced by a machine's latency model, not by the clock: noise is not a wrong decision.
    """

    taken_s: float
    best: Oracle

    @property
    def seconds(self) -> float:
        return self.taken_s - self.best.total_s

    @property
    def share(self) -> float:
        return self.seconds / self.best.total_s


def regret(workload: Workload, machine: Machine, trace: RolloutTrace) -> Regret:
    splits = {str(split): split for split in machine.splits}
    path = tuple((splits[switch.target], switch) for switch in trace.switches)
    planner = _AsTaken(splits[trace.path[0]], path, trace.balanced, machine.check_every)
    return Regret(replay(workload, planner, machine).total_s, oracle(workload, machine))


@dataclass(frozen=True)
class _AsTaken(Planner):
    """Repeats the switches and moves of a trace. Each is due once as few sequences run, and as many
    steps are done, as in the trace.

    Both must hold, because growing caches can cause a switch while no sequence ends.
    """

    first: Split
    path: tuple[tuple[Split, Move], ...]
    moves: tuple[Move, ...]  # moves between the replicas of a layout
    slack: int  # steps by which a replayed burst may end earlier than the real one

    def start(self, load: Load) -> Split:
        del load
        return self.first

    def decide(self, load: Load, current: Split, options: Sequence[np.ndarray] = ()) -> Plan:
        step = load.step + self.slack
        done = sum(load.running <= x.running and x.step <= step for _, x in self.path)
        split = self.first
        below = MIGRATE_ALL
        if done:
            split = self.path[done - 1][0]
            below = self.path[done - 1][1].recompute_below
        moves = self._moves(done)
        to_come = [switch.running // split.dp for _, switch in self.path[done:]]
        to_come += [move.fullest[0] for move in moves if move.step > load.step]
        replica = self._replica(load, moves, options) if split == current else None
        return Plan(split, max(to_come, default=0), below, replica)

    def _replica(
        self, load: Load, moves: Sequence[Move], options: Sequence[np.ndarray]
    ) -> np.ndarray | None:
        fullest = _fullest(load.replica)
        step = load.step + self.slack
        due = [move for move in moves if move.step <= step and fullest <= move.fullest[0]]
        least = min(due, key=lambda move: move.fullest[1], default=None)
        if not options or least is None or fullest <= least.fullest[1]:
            return None
        return min(options, key=lambda replica: abs(_fullest(replica) - least.fullest[1]))

    def _moves(self, done: int) -> list[Move]:
        """Returns the moves after the first `done` switches and before the next one."""
        steps = [0, *(switch.step for _, switch in self.path), math.inf]
        return [move for move in self.moves if steps[done] <= move.step <= steps[done + 1]]


def _fullest(replica: np.ndarray) -> int:
    return int(np.bincount(replica).max())
