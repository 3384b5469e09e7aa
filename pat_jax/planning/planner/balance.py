"""What it costs to move sequences between the replicas of a layout."""

import numpy as np

from pat_jax.planning.latency.model import LatencyModel
from pat_jax.planning.types import Load, Split


def balance_seconds(latency: LatencyModel, split: Split, load: Load, group: np.ndarray) -> float:
    """Profiled seconds until every sequence of `load` is in its `group`, int[live], at least one of
    them another than now; infinite where no such move was measured.

    Pages that go equally far go together (`engine/relocation/rounds.py`): of each distance the group
    that has most to send sets the number of rounds.
    """
    moved = np.flatnonzero(group != load.group)
    tokens = np.zeros((split.dp, split.dp))
    distance = (group - load.group)[moved] % split.dp
    np.add.at(tokens, (distance, load.group[moved]), load.context[moved])
    rounds = int(np.ceil(tokens.max(axis=1) / latency.round_tokens).sum())
    return rounds * latency.shift_round(split)


def describe_balance(load: Load, split: Split, group: np.ndarray) -> str:
    fullest, after = (int(np.bincount(x).max()) for x in (load.group, group))
    return (
        f"{int((group != load.group).sum())} of {load.live} sequences, from {fullest} to {after} "
        f"in the fullest group of {split}"
    )
