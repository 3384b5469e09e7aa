"""What it costs to move sequences between the replicas of a layout."""

from dataclasses import replace

import numpy as np

from pat_jax.planning.latency.model import LatencyModel
from pat_jax.planning.types import Load, Plan, Prediction, Split


def balance_seconds(latency: LatencyModel, split: Split, load: Load, replica: np.ndarray) -> float:
    """Profiled seconds until every sequence of `load` is in its `replica`, int[running], at least
    one of them another than now; infinite where no such move was measured.

    Pages that go equally far go together (`engine/relocation/rounds.py`): of each distance the
    replica that has most to send sets the number of rounds.
    """
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
    """The same plan, with every sequence of `load` in its `replica` before.

    Args:
      remaining_s: without and with the move, whose cost is not in it.
      cost_s: of the move, as profiled and as believed.
      step_s: float[layouts], a decode step afterwards, as profiled.
    """
    (stay, left), (profile_s, predicted_s), split = remaining_s, cost_s, plan.split
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
