import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.rl.algorithm.advantages import group_advantages, has_signal

REWARDS = np.random.default_rng(0).normal(size=(5, 8))


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("samples", [1, 7])
def test_equal_rewards_give_exactly_zero(scale, samples):
    """Though in float32 the rounded mean of 0.1 or 1/3 is another number."""
    rewards = np.full((6, samples), np.array([[0.0], [0.1], [1 / 3], [-7.3], [1e6], [1e6 / 3]]))
    np.testing.assert_array_equal(group_advantages(rewards, scale=scale), 0)
    assert not has_signal(rewards.astype(np.float32)).any()


@given(st.integers(2, 12), st.floats(-1e3, 1e3, allow_subnormal=False), st.integers(0, 2**32 - 1))
def test_rewards_equal_up_to_rounding_have_no_signal_and_others_have(samples, reward, seed):
    """Sums of the same parts in another order; float32 as rewards are kept."""
    parts = np.random.default_rng(seed).normal(size=(samples, 3)).argsort(axis=1)
    shares = np.array([0.1, 0.2, 0.7], np.float32) * np.float32(reward)
    rewards = np.array([np.add.reduce(shares[order]) for order in parts], np.float32)
    other = rewards.copy()
    other[0] += np.float32(1e-5) * abs(other[0]) + np.float32(1e-30)
    both = np.stack([rewards, other])
    assert has_signal(both).tolist() == [False, True]
    assert not group_advantages(both)[0].any() and group_advantages(both)[1].any()


@pytest.mark.parametrize("scale", ["group", "none"])
@given(data=st.data())
def test_a_response_without_a_reward_is_as_if_it_were_not_there(scale, data):
    is_missing = np.array(data.draw(st.lists(st.booleans(), min_size=8, max_size=8)))
    found = group_advantages(np.where(is_missing, np.nan, REWARDS), scale=scale)
    assert np.isnan(found[:, is_missing]).all()
    if not is_missing.all():
        alone = group_advantages(REWARDS[:, ~is_missing], scale=scale)
        np.testing.assert_allclose(found[:, ~is_missing], alone, rtol=1e-6)


def test_a_group_of_one_reward_or_of_none_has_no_signal():
    rewards = np.array([[np.nan, 3.0, np.nan], [np.nan] * 3, [1, 1, np.nan], [1, np.nan, 2]])
    assert has_signal(rewards).tolist() == [False, False, False, True]
    np.testing.assert_array_equal(
        group_advantages(rewards)[:3], [[np.nan, 0, np.nan], [np.nan] * 3, [0, 0, np.nan]]
    )


def test_an_infinite_reward_is_named():
    with pytest.raises(ValueError, match="the reward of sample 0 of group 1 is inf"):
        group_advantages(np.array([[1, 0], [np.inf, 0]]))
