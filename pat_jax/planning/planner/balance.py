"""Moves of sequences between the replicas of a layout: what they cost, and what they save.

A move that lowers the row bucket is made if the plan predicts that it pays. Within a bucket,
replicas become uneven again, so a move a little later would save as much. Such a move is due once
uneven replicas have lost as many seconds as it costs, or will have by the end of the next burst.
"""

from dataclasses import dataclass, replace

import numpy as np

from pat_jax.planning.latency.model import LatencyModel
from pat_jax.planning.planner.costs import CostTables
from pat_jax.planning.types import Load, Plan, Prediction, Split


def balance_seconds(latency: LatencyModel, split: Split, load: Load, replica: np.ndarray) -> float:
    """Returns the profiled seconds to move the sequences of `load` to the replicas `replica`,
    int[running]; infinite if no such move was measured. At least one sequence must move. Pages that
    go to the replica at the same distance share rounds (`engine/relocation/rounds.py`). For each
    distance, the replica with most to send sets the number of rounds."""
    moved = np.flatnonzero(replica != load.replica)
    tokens = np.zeros((split.dp, split.dp))
    distance = (replica - load.replica)[moved] % split.dp
    np.add.at(tokens, (distance, load.replica[moved]), load.context[moved])
    rounds = int(np.ceil(tokens.max(axis=1) / latency.round_tokens).sum())
    return rounds * latency.shift_round(split)


def balance_plan(
    plan: Plan,
    load: Load,
    replica: np.ndarray,
    remaining_s: tuple[float, float],
    cost_s: tuple[float, float],
    step_s: np.ndarray,
) -> Plan:
    """Returns `plan` with a move before the burst: each sequence of `load` to its `replica`.

    Args:
      remaining_s: seconds to the rollout's end without and with the move, the move itself left out.
      cost_s: seconds of the move, as profiled and as predicted.
      step_s: float[layouts], profiled seconds of a decode step after the move.
    """
    stay, left = remaining_s
    profile_s, predicted_s = cost_s
    split = plan.split
    fullest, after = (int(np.bincount(x).max()) for x in (load.replica, replica))
    what = (
        f"{int((replica != load.replica).sum())} of {load.running} sequences, from {fullest} to {after} "
        f"in the fullest replica of {split}"
    )
    return replace(
        plan,
        replica=replica,
        predicted_saving_s=stay - left,
        predicted_cost_s=predicted_s,
        reason=f"{what}: saves {stay - left:.2f} s of {stay:.2f} s, costs {predicted_s:.3f} s",
        prediction=Prediction(split, split, 0.0, profile_s, step_s),
    )


@dataclass
class Unevenness:
    """The seconds that uneven replicas have cost one rollout."""

    lost_s: float = 0.0
    next_s: float = 0.0  # seconds that a burst as long as the last one would lose
    _split: Split | None = None
    _step: float = 0.0  # decode steps done when `_excess_s` was seen
    _steps: float = 0.0  # decode steps of the last burst
    _excess_s: float = 0.0  # seconds by which a step is longer than one with even replicas

    def see(self, load: Load, split: Split, tables: CostTables, factor: float) -> None:
        """Adds the seconds that the last burst lost because replicas were uneven, and predicts
        those of the next burst: profiled seconds times `factor`."""
        steps = max(0.0, load.step - self._step)
        self.lost_s = self.lost_s + steps * self._excess_s if split == self._split else 0.0
        self._steps = steps or self._steps  # plans are made twice where sequences move
        fullest = int(np.bincount(load.replica).max())
        even = -(-load.running // split.dp)
        now_s, even_s = (step_seconds(tables, split, load, n) for n in (fullest, even))
        self._split = split
        self._step = load.step
        self._excess_s = factor * max(0.0, now_s - even_s)
        self.next_s = self._steps * self._excess_s

    def moved(self) -> None:
        self.lost_s = self.next_s = self._excess_s = 0.0


def step_seconds(tables: CostTables, split: Split, load: Load, fullest: int) -> float:
    """Returns the seconds of a decode step of `load` if the fullest replica has `fullest`
    sequences."""
    rows = np.full((len(tables.splits), 1), float(fullest))
    context, mean = np.full_like(rows, load.context.max()), np.full_like(rows, load.context.mean())
    running = np.full_like(rows, load.running)
    return float(tables.steps(rows, context, mean, running)[tables.splits.index(split), 0])
