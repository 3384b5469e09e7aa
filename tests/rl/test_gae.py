"""Rewards of tokens, advantages and returns: the sums of their papers, and verl's own numbers."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_jax.rl.algorithm.advantages import AdvantageEstimator
from pat_jax.rl.algorithm.gae import gae, token_rewards
from pat_jax.rl.algorithm.whitening import whitened

# Made by make_critic_reference.py.
VERL = json.loads(Path(__file__).with_name("recorded_critic.json").read_text(encoding="utf-8"))


def arrays(name: str) -> list[np.ndarray]:
    return [np.array(each) for each in VERL[name]]


def assert_close(found, expected, atol=1e-6):
    for one, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, wanted, atol=atol)


@pytest.mark.parametrize("case", range(4))
def test_advantages_and_returns_are_verls(case: int):
    recorded = VERL["gae"][case]
    advantages, returns = gae(
        arrays("rewards"), arrays("values"), recorded["gamma"], recorded["lam"]
    )
    assert {each.dtype for each in (*advantages, *returns)} == {np.dtype(np.float32)}
    assert_close(returns, recorded["returns"])
    assert_close(whitened(advantages), recorded["advantages"])


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening_is_verls(shift_mean: bool):
    found = whitened(arrays("rewards"), shift_mean=shift_mean)
    assert_close(found, VERL[f"whitened_{shift_mean}"], atol=1e-9)
    tokens = np.concatenate(found)
    mean = 0.0 if shift_mean else np.concatenate(arrays("rewards")).mean()
    np.testing.assert_allclose([tokens.mean(), tokens.std(ddof=1)], [mean, 1.0], atol=1e-6)


def test_reinforce_plus_plus_is_verls():
    """Its only reward beside the KL is at the end, so verl's rewards are the KL of all others."""
    rewards = arrays("rewards")
    scores = np.array([[each[-1] for each in rewards]])
    kl = [np.append(-each[:-1], 0.0) for each in rewards]
    lengths = np.array([[len(each) for each in rewards]])
    estimator = AdvantageEstimator(baseline="none", scale="none", whiten=True, beta=1.0)
    (found,) = estimator(scores, lengths, kl)
    assert_close(found, VERL["reinforce_pp"])


def test_missing_rewards_and_few_tokens_are_whitened_to_numbers():
    nothing = np.full(3, np.nan)
    assert_close(whitened([nothing, np.array([2.0, 4.0])]), [nothing, np.array([-1, 1]) / 2**0.5])
    assert_close(whitened([np.array([5.0]), nothing]), [[0.0], nothing])
    assert_close(whitened([np.full(4, 0.1)]), [np.zeros(4)])
    assert whitened([]) == [] and np.isnan(whitened([nothing])[0]).all()


def test_the_score_is_the_last_tokens_and_kl_is_everyones():
    kl = [np.array([0.5, -1.0, 2.0]), np.array([4.0]), np.zeros(2), np.zeros(0)]
    found = token_rewards(np.array([1.0, -1.0, np.nan, 3.0]), kl, 0.1)
    assert_close(found, [[-0.05, 0.1, 0.8], [-1.4], [0.0, np.nan], []], atol=1e-12)
    np.testing.assert_array_equal(kl[0], [0.5, -1.0, 2.0])


def test_a_response_without_a_reward_has_no_advantage_and_changes_no_other():
    rewards, values = arrays("rewards"), arrays("values")
    expected, _ = gae(rewards, values, 0.9, 0.8)
    rewards[2][-1] = np.nan
    advantages, returns = gae(rewards, values, 0.9, 0.8)
    assert np.isnan(advantages[2]).all() and np.isnan(returns[2]).all()
    del advantages[2], expected[2]
    assert_close(advantages, expected, atol=0)


lengths = st.lists(st.integers(0, 7), max_size=6)
share = st.floats(0, 1)


@given(lengths, share, share, st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_advantages_are_the_weighted_sums_of_the_paper(lengths, gamma, lam, seed):
    """arXiv 1506.02438, eq. 16: A_t = Σ_l (γ λ)^l δ_{t+l}, summed by definition."""
    rng = np.random.default_rng(seed)
    rewards, values = ([rng.normal(size=n) for n in lengths] for _ in range(2))
    advantages, returns = gae(rewards, values, gamma, lam)
    for reward, value, advantage, gained in zip(rewards, values, advantages, returns, strict=True):
        n = len(reward)
        following = [*value, 0.0]
        delta = [reward[t] + gamma * following[t + 1] - value[t] for t in range(n)]
        wanted = [sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, n)) for t in range(n)]
        np.testing.assert_allclose(advantage, wanted, atol=1e-6)
        np.testing.assert_allclose(gained, np.add(wanted, value), atol=1e-6)


@given(lengths, share, st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_the_ends_of_lambda(lengths, gamma, seed):
    """λ = 1: returns are discounted rewards, whatever the critic. A perfect critic: no advantage."""
    rng = np.random.default_rng(seed)
    rewards, values = ([rng.normal(size=n) for n in lengths] for _ in range(2))
    discounted = [
        np.array([sum(gamma ** (s - t) * r[s] for s in range(t, len(r))) for t in range(len(r))])
        for r in rewards
    ]
    assert_close(gae(rewards, values, gamma, 1.0)[1], discounted)
    for lam in (0.0, 0.7, 1.0):
        advantages, _ = gae(rewards, discounted, gamma, lam)
        assert_close(advantages, [np.zeros(n) for n in lengths])
