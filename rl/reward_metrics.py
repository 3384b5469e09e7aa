"""What is logged of the rewards of an iteration. NaN is the reward of a response that has none."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

from pat_jax.rl.advantages import has_signal
from pat_jax.rl.reward_outcome import Failure, failure_metrics


def describe_rewards(
    rewards: Float[np.ndarray, "groups samples"], failures: Mapping[int, Failure]
) -> dict[str, float | int]:
    """The metrics `reward/*`, of the scored responses, and how many of the others there are."""
    scored = rewards[~np.isnan(rewards)]
    return {
        "reward/mean": mean_reward(rewards),
        "reward/std": float(scored.std(dtype=np.float64)) if scored.size else float("nan"),
        "reward/groups_without_signal": float(np.mean(~has_signal(rewards))),
        **failure_metrics(failures.values()),
    }


def mean_reward(rewards: Float[np.ndarray, "*shape"]) -> float:
    """Mean over the scored responses; NaN if there are none."""
    scored = rewards[~np.isnan(rewards)]
    return float(scored.mean(dtype=np.float64)) if scored.size else float("nan")
