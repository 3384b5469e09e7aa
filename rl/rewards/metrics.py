"""What is logged of the rewards of an iteration. NaN is the reward of a response that has none."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from pat_jax.rl.algorithm.advantages import has_signal
from pat_jax.rl.rewards.outcome import Failure, count_causes
from pat_jax.rl.rewards.rewards import metric_name
from pat_jax.rl.rewards.weighted_sum import FunctionScores


def describe_rewards(
    rewards: Float[np.ndarray, "groups samples"],
    failures: Mapping[int, Failure],
    functions: Sequence[FunctionScores],
) -> dict[str, float | int]:
    """The metrics `reward/*`, of the scored responses, and how many of the others there are."""
    scored = rewards[~np.isnan(rewards)]
    return {
        **_by_function(functions),
        "reward/mean": mean_reward(rewards),
        "reward/std": float(scored.std(dtype=np.float64)) if scored.size else float("nan"),
        "reward/groups_without_signal": float(np.mean(~has_signal(rewards))),
        "reward/failed": len(failures),
        **count_causes(failures.values(), "reward/failed"),
    }


def mean_reward(rewards: Float[np.ndarray, "*shape"]) -> float:
    """Mean over the scored responses; NaN if there are none."""
    scored = rewards[~np.isnan(rewards)]
    return float(scored.mean(dtype=np.float64)) if scored.size else float("nan")


def _by_function(functions: Sequence[FunctionScores]) -> dict[str, float | int]:
    """What functions measured beside their scores, and of several the mean score, without its weight."""
    found: dict[str, float | int] = {}
    for one in functions:
        prefix = f"reward/{one.name}"
        measured: defaultdict[str, list[float]] = defaultdict(list)
        for numbers in one.numbers:
            for key, number in numbers.items():
                measured[metric_name(key)].append(number)
        found |= {f"{prefix}/{key}": float(np.mean(values)) for key, values in measured.items()}
        if len(functions) > 1:
            found[f"{prefix}/mean"] = mean_reward(one.array)
            found |= count_causes(one.failures, f"{prefix}/failed")
    return found
