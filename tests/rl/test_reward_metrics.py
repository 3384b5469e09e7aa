import numpy as np
import pytest

from pat_jax.rl.reward_metrics import describe_rewards, mean_reward
from pat_jax.rl.reward_outcome import Cause, Failure


def test_metrics_are_of_the_scored_responses_and_count_the_others_by_cause():
    rewards = np.array([[1.0, np.nan, 0.0], [2.0, 2.0, np.nan], [np.nan] * 3], np.float32)
    causes = [Cause.NONE, Cause.TIMEOUT, Cause.TIMEOUT, Cause.CRASHED, Cause.TIMEOUT]
    failures = {row: Failure(cause, "…") for row, cause in enumerate(causes)}
    assert describe_rewards(rewards, failures) == {
        "reward/mean": 1.25,
        "reward/std": pytest.approx(0.6875**0.5),
        "reward/groups_without_signal": 2 / 3,
        "reward/failed": 5,
        "reward/failed/crashed": 1,
        "reward/failed/none": 1,
        "reward/failed/timeout": 3,
    }


def test_fractional_rewards_that_are_equal_are_no_signal():
    rewards = np.full((50, 8), 0.1, np.float32) * np.arange(1, 51, dtype=np.float32)[:, None]
    assert describe_rewards(rewards, {})["reward/groups_without_signal"] == 1


def test_where_nothing_was_scored_there_is_no_mean():
    nothing = np.full((1, 2), np.nan)
    described = describe_rewards(nothing, {})
    assert np.isnan(mean_reward(nothing)) and np.isnan(described["reward/std"])
    assert described["reward/groups_without_signal"] == 1 and described["reward/failed"] == 0
