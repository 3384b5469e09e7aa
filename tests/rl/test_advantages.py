import numpy as np
import pytest

from pat_jax.rl.advantages import group_advantages

REWARDS = np.random.default_rng(0).normal(size=(5, 8))


def test_matches_the_formula():
    for rewards, scaled, centred in zip(
        REWARDS,
        group_advantages(REWARDS, scale="group", eps=1e-3),
        group_advantages(REWARDS, scale="none"),
        strict=True,
    ):
        mean = sum(rewards) / len(rewards)
        std = (sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) ** 0.5
        np.testing.assert_allclose(scaled, [(r - mean) / (std + 1e-3) for r in rewards], rtol=1e-6)
        np.testing.assert_allclose(centred, [r - mean for r in rewards], rtol=1e-6)


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, -7.3, 1e6])
@pytest.mark.parametrize("samples", [1, 3, 8])
def test_equal_rewards_give_exactly_zero(scale, reward, samples):
    rewards = np.full((2, samples), reward)
    np.testing.assert_array_equal(group_advantages(rewards, scale=scale, eps=0.0), 0)


def test_a_group_does_not_see_the_others():
    alone = [group_advantages(rewards[None]) for rewards in REWARDS]
    np.testing.assert_array_equal(group_advantages(REWARDS), np.concatenate(alone))


def test_scaling_removes_the_unit_and_the_offset_of_the_reward():
    moved = group_advantages(7.0 * REWARDS + 3.0, eps=0.0)
    np.testing.assert_allclose(moved, group_advantages(REWARDS, eps=0.0), rtol=1e-5)
    assert not np.allclose(group_advantages(7.0 * REWARDS, scale="none"), moved, rtol=0.1)


def test_a_reward_that_is_not_finite_is_named():
    rewards = np.zeros((2, 3))
    rewards[1, 2] = np.nan
    with pytest.raises(ValueError, match="sample 2 of group 1 is nan"):
        group_advantages(rewards)
