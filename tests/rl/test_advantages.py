"""Advantages of groups, and what is done to rewards before: formulas in float64 and brute force."""

import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_jax.rl.algorithm.advantages import gdpo_advantages, group_advantages, has_signal
from pat_jax.rl.algorithm.reward_shaping import RewardMoments, shaped_rewards

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


# --- what is done to rewards before ---------------------------------------------------------------

RNG = np.random.default_rng(0)
DRAWN = RNG.normal(3.0, 2.0, (4, 6))
ENDED = np.ones(DRAWN.shape, bool)


# --- running normalisation, clip, missing end ----------------------------------------------------


@given(st.lists(st.integers(0, 9), max_size=5), st.floats(-1e3, 1e3), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_moments_of_parts_are_those_of_all(sizes, level, seed):
    parts = [level + np.random.default_rng(seed + i).normal(size=n) for i, n in enumerate(sizes)]
    moments = RewardMoments()
    for part in parts:
        moments = moments.after(np.append(part, np.nan))
    seen = np.concatenate([*parts, []])
    assert moments.count == len(seen)
    if len(seen):
        np.testing.assert_allclose(moments.mean, seen.mean(), rtol=1e-9, atol=1e-9)
    if len(seen) > 1:
        np.testing.assert_allclose(moments.deviation, seen.std(ddof=1), rtol=1e-6)
        expected = (DRAWN - seen.mean()) / (seen.std(ddof=1) + 1e-6)
        np.testing.assert_allclose(moments.normalized(DRAWN), expected, rtol=1e-5, atol=1e-8)
    assert RewardMoments(**json.loads(json.dumps(asdict(moments)))) == moments


def test_the_penalty_of_a_missing_end_is_not_clipped_away():
    rewards, has_end = np.array([9.0, -9.0, np.nan, 0.5]), np.array([True, False, False, False])
    found = shaped_rewards(rewards, has_end, clip=(-5.0, 4.0), missing_eos_penalty=1.5)
    np.testing.assert_array_equal(found, [4.0, -6.5, np.nan, -1.0])


def test_rewards_are_normalised_before_they_are_clipped():
    moments = RewardMoments().after(DRAWN)
    found = shaped_rewards(DRAWN, ENDED, moments=moments, clip=(-1.0, 1.0))
    expected = np.clip((DRAWN - DRAWN.mean()) / DRAWN.std(ddof=1), -1, 1)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.abs(found).max() == 1
    np.testing.assert_array_equal(shaped_rewards(DRAWN, ENDED), DRAWN)


# --- each reward normalised on its own (GDPO) ----------------------------------------------------

SCORES = np.stack([RNG.normal(size=(4, 6)), 100 * RNG.normal(size=(4, 6)), RNG.random((4, 6))])


def gdpo(scores: np.ndarray, weights: list[float]) -> np.ndarray:
    """arXiv 2601.05242, number by number."""
    total = np.zeros(scores.shape[1:])
    for weight, of_function in zip(weights, scores, strict=True):
        for g, group in enumerate(of_function):
            mean, std = np.mean(group), np.std(group, ddof=1)
            total[g] += [weight * (x - mean) / std for x in group]
    return (total - total.mean()) / total.std(ddof=1)


def test_gdpo_is_the_papers():
    weights = [1.0, 0.5, 2.0]
    found = gdpo_advantages(SCORES, weights)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, gdpo(SCORES, weights), atol=1e-5)
    np.testing.assert_allclose([found.mean(), found.std(ddof=1)], [0, 1], atol=1e-6)


def test_gdpo_leaves_out_what_has_no_score():
    """A function of weight 0, one that does not apply to a response, one without signal."""
    scores = SCORES.copy()
    scores[0, 0, 0], scores[:2, 1, 2], scores[1, 3] = np.nan, np.nan, 0.1
    found = gdpo_advantages(scores, [1.0, 1.0, 0.0])
    assert np.argwhere(np.isnan(found)).tolist() == [[1, 2]]
    by_function = [group_advantages(each).astype(np.float64) for each in scores[:2]]
    assert not by_function[1][3].any()
    total = np.nansum(by_function, axis=0)
    total[1, 2] = np.nan
    expected = (total - np.nanmean(total)) / np.nanstd(total, ddof=1)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_equal_rewards_are_normalised_to_zero():
    moments = RewardMoments().after(np.full(5, 0.1)).after(np.full(3, 0.1))
    np.testing.assert_allclose(moments.normalized(np.full(4, 0.1)), 0, atol=1e-9)
