"""On-policy distillation: both forms are the reverse KL, and its gradient."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_jax.rl.algorithm.distill_loss import distill_advantages, top_k_reverse_kl
from pat_jax.rl.algorithm.losses import ENTROPY, LOGPROBS
from pat_jax.rl.algorithm.policy_loss import PolicyLoss

# Made by trl_losses.py; test_trl_losses_parity.py holds it against TRL.
TRL = json.loads(Path(__file__).with_name("recorded_trl.json").read_text(encoding="utf-8"))
VOCABULARY = 11


def logits(seed: int, spread: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    """Of the policy and of the teacher at one position."""
    drawn = np.random.default_rng(seed).normal(0, spread, (2, VOCABULARY))
    return drawn[0].astype(np.float32), drawn[1].astype(np.float32)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def reverse_kl(policy: np.ndarray, teacher: np.ndarray) -> tuple[float, np.ndarray]:
    """KL(policy || teacher) in float64, and its gradient in the policy's logits."""
    log_p, log_q = log_softmax(policy), log_softmax(teacher)
    p, apart = np.exp(log_p), log_p - log_q
    return float(p @ apart), p * (apart - p @ apart)


def test_the_advantage_is_how_much_likelier_the_teacher_finds_the_token():
    old = [np.array([-1.0, -2.5], np.float32), np.array([-0.5], np.float32)]
    teacher = [np.array([-0.25, -50.0], np.float32), np.array([-0.5], np.float32)]
    found = distill_advantages(old, teacher)
    assert [each.tolist() for each in found] == [[0.75, -20.0], [0.0]]
    assert {each.dtype for each in found} == {np.dtype(np.float32)}


@pytest.mark.parametrize("seed", range(3))
def test_over_all_tokens_the_policy_gradient_is_that_of_the_reverse_kl(seed: int):
    """Each token of the vocabulary once, weighted by its probability: the expectation."""
    policy, teacher = logits(seed)
    old = log_softmax(policy).astype(np.float32)
    (advantages,) = distill_advantages([old], [log_softmax(teacher).astype(np.float32)])
    columns = {"advantages": advantages, "old_logprobs": old, "behavior_logprobs": old}
    columns = {name: jnp.asarray(x)[None] for name, x in columns.items()}

    def loss(x):
        logprobs = jax.nn.log_softmax(x)[None]
        predicted = {LOGPROBS: logprobs, ENTROPY: jnp.zeros_like(logprobs)}
        return PolicyLoss()(predicted, columns, jnp.exp(jnp.asarray(old))[None])[0]

    wanted, gradient = reverse_kl(policy, teacher)
    value, found = jax.value_and_grad(loss)(jnp.asarray(policy))
    assert value == pytest.approx(wanted, abs=1e-6)
    np.testing.assert_allclose(found, gradient, atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_with_the_whole_vocabulary_it_is_the_reverse_kl(seed: int):
    policy, teacher = logits(seed)
    teacher_logprobs = jnp.asarray(log_softmax(teacher), jnp.float32)

    def loss(x):
        return top_k_reverse_kl(jax.nn.log_softmax(x), teacher_logprobs)

    wanted, gradient = reverse_kl(policy, teacher)
    with jax.numpy_dtype_promotion("strict"):
        value, found = jax.value_and_grad(loss)(jnp.asarray(policy))
    assert value == pytest.approx(wanted, abs=2e-6)
    np.testing.assert_allclose(found, gradient, atol=2e-6)


def test_with_the_whole_vocabulary_it_is_trls():
    student, teacher = (jnp.asarray(TRL["given"][name]) for name in ("student", "teacher"))

    def loss(x):
        return jnp.mean(top_k_reverse_kl(jax.nn.log_softmax(x), jax.nn.log_softmax(teacher)))

    value, gradient = jax.value_and_grad(loss)(student)
    assert value == pytest.approx(TRL["distill"]["loss"], abs=1e-6)
    np.testing.assert_allclose(gradient, TRL["distill"]["gradient"], atol=1e-6)


def merged(policy: np.ndarray, teacher: np.ndarray, ids: np.ndarray) -> float:
    """The KL of the two distributions over the tokens `ids` and all others as one, in float64."""
    p, q = np.exp(log_softmax(policy)), np.exp(log_softmax(teacher))
    p, q = (np.append(x[ids], np.delete(x, ids).sum()) for x in (p, q))
    return float(p @ np.log(p / q))


def top_k(policy: np.ndarray, teacher: np.ndarray, k: int):
    """The loss of the policy's k likeliest tokens, as a function of the policy's logits; their ids."""
    ids = np.argsort(-policy)[:k]
    teacher_logprobs = jnp.asarray(log_softmax(teacher), jnp.float32)[ids]
    return lambda x: top_k_reverse_kl(jax.nn.log_softmax(x)[ids], teacher_logprobs), ids


# Few numbers of tokens: each compiles.
@given(st.sampled_from([1, 3, 8]), st.floats(0.0, 4.0), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=20)
def test_other_tokens_are_counted_as_one(k, spread, seed):
    policy, teacher = logits(seed, spread)
    loss, ids = top_k(policy, teacher, k)
    value = float(loss(jnp.asarray(policy)))
    assert value == pytest.approx(merged(policy, teacher, ids), abs=5e-6)
    assert -1e-6 <= value <= reverse_kl(policy, teacher)[0] + 5e-6


@pytest.mark.parametrize("k", [1, 3, 8])
def test_the_gradient_of_few_tokens_is_that_of_their_loss(k: int):
    """Against differences of the loss in float64."""
    policy, teacher = logits(5)
    loss, ids = top_k(policy, teacher, k)
    gradient, exact = jax.grad(loss)(jnp.asarray(policy)), policy.astype(np.float64)
    for i in range(VOCABULARY):
        step = 1e-5 * (np.arange(VOCABULARY) == i)
        up, down = (merged(exact + sign * step, teacher, ids) for sign in (1, -1))
        assert float(gradient[i]) == pytest.approx((up - down) / 2e-5, abs=1e-5)


def test_it_grows_with_the_number_of_tokens_to_the_whole():
    policy, teacher = logits(6)
    values = [
        float(top_k(policy, teacher, k)[0](jnp.asarray(policy))) for k in (1, 3, 8, VOCABULARY)
    ]
    assert (np.diff(values) >= -1e-6).all()
    assert values[-1] == pytest.approx(reverse_kl(policy, teacher)[0], abs=2e-6)


@pytest.mark.parametrize("certain", [50.0, 1e30])
def test_loss_and_gradient_are_finite_for_certain_policies_and_teachers(certain: float):
    one, other = jnp.zeros(4).at[0].set(certain), jnp.zeros(4).at[1].set(certain)
    for policy, teacher in ((one, other), (one, one), (one, jnp.zeros(4)), (jnp.zeros(4), one)):

        def loss(x, teacher=teacher):
            return top_k_reverse_kl(jax.nn.log_softmax(x)[:2], jax.nn.log_softmax(teacher)[:2])

        value, gradient = jax.value_and_grad(loss)(policy)
        assert np.isfinite(value) and np.isfinite(gradient).all()
        assert value >= 0 and (value > 1) == (policy is not teacher)
