import numpy as np
import pytest

from pat_jax.rl.rewards.metrics import describe_rewards, mean_reward
from pat_jax.rl.rewards.outcome import Cause, Failure
from pat_jax.rl.rewards.weighted_sum import FunctionScores, weighted_sum


def test_metrics_are_of_the_scored_responses_and_count_the_others_by_cause():
    rewards = np.array([[1.0, np.nan, 0.0], [2.0, 2.0, np.nan], [np.nan] * 3], np.float32)
    causes = [Cause.NONE, Cause.TIMEOUT, Cause.TIMEOUT, Cause.CRASHED, Cause.TIMEOUT]
    failures = {row: Failure(cause, "…") for row, cause in enumerate(causes)}
    assert describe_rewards(rewards, failures, []) == {
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
    assert describe_rewards(rewards, {}, [])["reward/groups_without_signal"] == 1


def test_where_nothing_was_scored_there_is_no_mean():
    nothing = np.full((1, 2), np.nan)
    described = describe_rewards(nothing, {}, [])
    assert np.isnan(mean_reward(nothing)) and np.isnan(described["reward/std"])
    assert described["reward/groups_without_signal"] == 1 and described["reward/failed"] == 0


def test_several_functions_have_their_own_means_causes_and_numbers():
    none, slow = Failure(Cause.NONE, "…"), Failure(Cause.TIMEOUT, "…")
    right = FunctionScores("m:right", "right", 1.0, [1.0, 0.0, slow, none], [{}] * 4)
    measured = [{"acc": 1.0}, {"acc": 0.0, "two words": 3.0}, {}, {"mean": 9.0}]
    short = FunctionScores("m:short", "short", -2.0, [0.5, none, 0.25, none], measured)
    rewards, failures = weighted_sum([right, short])
    described = describe_rewards(rewards.reshape(2, 2), failures, [right, short])
    assert described["reward/mean"] == 0 and described["reward/failed"] == 2
    by_function = {name: x for name, x in described.items() if name.count("/") > 1}
    assert by_function == {
        "reward/failed/none": 1,
        "reward/failed/timeout": 1,
        "reward/right/mean": 0.5,
        "reward/right/failed/none": 1,
        "reward/right/failed/timeout": 1,
        "reward/short/mean": 0.375,
        "reward/short/failed/none": 2,
        "reward/short/acc": 0.5,
        "reward/short/two_words": 3.0,
    }
    alone = describe_rewards(right.array.reshape(2, 2), {2: slow, 3: none}, [right])
    assert not [name for name in alone if name.startswith("reward/right")]
