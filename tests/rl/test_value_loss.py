"""The critic: its loss, rewards of tokens, advantages and β, by their papers and by verl's own numbers."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_jax.rl.algorithm.advantages import AdvantageEstimator, whitened
from pat_jax.rl.algorithm.critic_estimator import gae, token_rewards
from pat_jax.rl.algorithm.losses import VALUES
from pat_jax.rl.algorithm.reward_shaping import KLControl
from pat_jax.rl.algorithm.value_loss import ValueLoss

# Made by make_critic_reference.py.
VERL = json.loads(Path(__file__).with_name("recorded_critic.json").read_text(encoding="utf-8"))
LENGTHS = [len(each) for each in VERL["values"]]
WIDTH = max(LENGTHS) + 2
MASK = np.array([[1 <= t < 1 + n for t in range(WIDTH)] for n in LENGTHS])
WEIGHTS = MASK / MASK.sum()


def padded(name: str) -> np.ndarray:
    filled = np.zeros(MASK.shape)
    filled[MASK] = np.concatenate(VERL[name])
    return filled


def run(loss: ValueLoss, value, weights=WEIGHTS, **columns) -> tuple[float, np.ndarray, Any]:
    """The loss, its gradient in the values, and its sums."""
    read = {name: jnp.asarray(padded(alias), jnp.float32) for name, alias in NAMES.items()}
    read |= {name: jnp.asarray(x, jnp.float32) for name, x in columns.items()}

    def of(value):
        return loss({VALUES: value}, read, jnp.asarray(weights, jnp.float32))

    with jax.numpy_dtype_promotion("strict"):
        (total, sums), gradient = jax.jit(jax.value_and_grad(of, has_aux=True))(
            jnp.asarray(value, jnp.float32)
        )
    return float(total), np.asarray(gradient), sums


NAMES = {"returns": "returns", "old_values": "values"}


def test_loss_gradient_and_clip_fraction_are_verls():
    wanted = VERL["value_loss"]
    loss = ValueLoss(epsilon=wanted["clip"])
    total, gradient, sums = run(loss, padded("predicted"))
    assert total == pytest.approx(wanted["loss"], abs=1e-6)
    np.testing.assert_allclose(gradient[MASK], np.concatenate(wanted["gradient"]), atol=1e-6)
    assert not gradient[~MASK].any() and 0 < wanted["clip_fraction"] < 1
    found = loss.summary([jax.device_get(sums)])
    assert found["clip_fraction"] == pytest.approx(wanted["clip_fraction"], abs=1e-6)
    assert found["loss"] == pytest.approx(total, abs=1e-6)


def test_without_a_clip_it_is_half_the_mean_squared_error():
    value, returns = padded("predicted"), padded("returns")
    loss = ValueLoss(epsilon=0.0)
    total, gradient, sums = run(loss, value)
    errors = value[MASK] - returns[MASK]
    assert total == pytest.approx(0.5 * np.mean(errors**2), rel=1e-6)
    np.testing.assert_allclose(gradient[MASK], errors / MASK.sum(), atol=1e-7)
    assert loss.summary([jax.device_get(sums)])["clip_fraction"] == 0


def test_over_micro_batches_the_metrics_are_those_of_all_tokens():
    loss, value = ValueLoss(), padded("predicted")
    total = loss.zero_sums()
    for rows in ([0, 3], [1], [2, 4]):
        part = np.where(np.isin(np.arange(len(LENGTHS)), rows)[:, None], WEIGHTS, 0)
        total = loss.add(total, run(loss, value, part)[2])
    found = loss.summary([jax.device_get(total)])
    returns, old = padded("returns")[MASK], padded("values")[MASK]
    expected = {
        "return_mean": returns.mean(),
        "value_mean": value[MASK].mean(),
        "explained_variance": 1 - np.var(returns - old) / np.var(returns),
    }
    assert found.keys() == {"loss", "clip_fraction", *expected}
    for name, wanted in expected.items():
        assert found[name] == pytest.approx(wanted, abs=1e-5), name


@pytest.mark.parametrize("level", [0.0, 0.1, 30.0])
def test_explained_variance_of_good_and_bad_critics(level: float):
    returns = level + padded("returns")

    def explained(old: np.ndarray, returns: np.ndarray = returns) -> float:
        _, _, sums = run(ValueLoss(), old, returns=returns, old_values=old)
        return ValueLoss().summary([jax.device_get(sums)])["explained_variance"]

    assert explained(returns) == pytest.approx(1.0, abs=1e-6)
    assert explained(np.full_like(returns, level)) == pytest.approx(0.0, abs=0.1)
    assert explained(3 * level - 2 * returns) < -5
    assert np.isnan(explained(returns, np.full_like(returns, level)))


def test_nothing_in_the_loss_gives_zero_and_metrics_that_are_nan():
    nothing = np.full(MASK.shape, np.nan)
    total, gradient, sums = run(ValueLoss(), nothing, 0 * WEIGHTS, returns=nothing)
    assert total == 0 and not gradient.any()
    assert all(np.isnan(x) for x in ValueLoss().summary([jax.device_get(sums)]).values())


# --- rewards of tokens, advantages and returns ----------------------------------------------------


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


# --- β towards a target KL ------------------------------------------------------------------------


def test_beta_is_verls():
    wanted = VERL["kl_control"]
    control = KLControl(wanted["beta"], wanted["target"], wanted["horizon"])
    for step in wanted["steps"]:
        control = control.after(step["kl"], step["n"])
        assert control.beta == pytest.approx(step["beta"], rel=1e-12)


def test_a_fixed_beta_stays():
    assert KLControl(0.05).after(100.0, 512) == KLControl(0.05)


def test_at_the_target_and_without_responses_beta_stays():
    control = KLControl(0.05, target=6.0)
    assert control.after(6.0, 512) == control.after(math.nan, 0) == control


def test_it_moves_at_most_a_fifth_of_the_horizons_share():
    control = KLControl(1.0, target=0.1, horizon=1000)
    assert control.after(1e9, 100).beta == pytest.approx(1.02)
    assert control.after(-1e9, 100).beta == pytest.approx(0.98)


@pytest.mark.parametrize("control", [KLControl(0.1), KLControl(0.1, 3.0, 500).after(7.0, 33)])
def test_a_checkpoint_has_all_of_it(control: KLControl):
    assert KLControl(**json.loads(json.dumps(asdict(control)))) == control
