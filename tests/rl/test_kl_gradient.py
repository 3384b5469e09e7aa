"""The KL in the loss, as an exact mean over all tokens: whose gradient it has."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from divergences import VOCABULARY, log_softmax, logits, reverse_kl

from pat_jax.config.learning import AlgorithmConfig
from pat_jax.rl.algorithm.kl import distill_advantages
from pat_jax.rl.algorithm.logprobs import (
    token_logprobs,
    top_k_reverse_kl,
    top_token_logprobs,
    top_tokens,
)
from pat_jax.rl.algorithm.losses import ENTROPY, LOGPROBS
from pat_jax.rl.algorithm.policy_loss import PolicyLoss
from pat_jax.training.build import policy_loss

VOCAB = 12


def drawn(spread: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits of the policy, of the old policy near it, and of a reference as far as `spread`."""
    rng = np.random.default_rng(7)
    policy = rng.normal(0, 1, VOCAB)
    return policy, policy + rng.normal(0, 0.3, VOCAB), policy + rng.normal(0, spread, VOCAB)


def softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits - np.logaddexp.reduce(logits))


def gradient_of_kl(p: np.ndarray, q: np.ndarray, *, is_reversed: bool = False) -> np.ndarray:
    """Of KL(p || q), or of KL(q || p), with respect to the logits of p."""
    if is_reversed:
        return p - q
    log_ratio = np.log(p / q)
    return p * (log_ratio - np.sum(p * log_ratio))


def penalty(
    logits: tuple[np.ndarray, np.ndarray, np.ndarray], *, is_on_policy: bool, **options: Any
) -> tuple[float, float, np.ndarray]:
    """What the loss and its metric are, and the gradient with respect to the logits, where every
    token is sampled as often as the sampling policy would: only the penalty is left in the loss."""
    policy, old, reference = logits
    loss = policy_loss(AlgorithmConfig(beta=1.0, **options), is_on_policy=is_on_policy)
    sampling = softmax(policy if is_on_policy else old)
    zeros = jnp.zeros((1, VOCAB))
    columns = {"advantages": zeros, "behavior_logprobs": zeros}
    columns |= {
        name: jnp.asarray(np.log(softmax(x))[None], jnp.float32)
        for name, x in (("old_logprobs", old), ("reference_logprobs", reference))
    }

    def of(logits: jax.Array) -> Any:
        predicted = {LOGPROBS: jax.nn.log_softmax(logits)[None], ENTROPY: zeros}
        return loss(predicted, columns, jnp.asarray(sampling[None], jnp.float32))

    (value, sums), found = jax.value_and_grad(of, has_aux=True)(jnp.asarray(policy, jnp.float32))
    return float(value), float(sums["reference_kl"]), np.asarray(found, np.float64)


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


@pytest.mark.parametrize("spread", [0.3, 2.0])
@pytest.mark.parametrize("is_on_policy", [True, False])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_ratio_gives_the_gradient_of_the_kl_that_is_reported(spread, is_on_policy, estimator):
    logits = drawn(spread)
    given = {"use_bias_correction_kl": True, "kl_estimator": estimator}
    value, reported, gradient = penalty(logits, is_on_policy=is_on_policy, **given)
    p, _, q = map(softmax, logits)
    np.testing.assert_allclose(gradient, gradient_of_kl(p, q), atol=2e-6)
    assert value == pytest.approx(reported, rel=1e-5)
    if estimator == "k3":
        assert value == pytest.approx(np.sum(p * np.log(p / q)), rel=1e-4)


def test_k3_alone_has_the_gradient_of_the_kl_the_other_way_round():
    """Of the same value, and the farther the reference, the less it points where the KL falls."""
    found = []
    for spread in (0.3, 2.0):
        logits = drawn(spread)
        value, _, gradient = penalty(logits, is_on_policy=True, use_bias_correction_kl=False)
        p, _, q = map(softmax, logits)
        assert value == pytest.approx(np.sum(p * np.log(p / q)), rel=1e-4)
        np.testing.assert_allclose(gradient, gradient_of_kl(p, q, is_reversed=True), atol=2e-6)
        found.append(cosine(gradient, gradient_of_kl(p, q)))
    assert found[1] < 0.9 < 0.98 < found[0]


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

    wanted, gradient = reverse_kl(policy, teacher, VOCABULARY)
    value, found = jax.value_and_grad(loss)(jnp.asarray(policy))
    assert value == pytest.approx(wanted, abs=1e-6)
    np.testing.assert_allclose(found, gradient, atol=1e-6)


# --- over a teacher's likeliest tokens ------------------------------------------------------------

# Made by trl_losses.py; test_trl_parity.py holds it against TRL.
TRL = json.loads(Path(__file__).with_name("recorded_trl.json").read_text(encoding="utf-8"))


@partial(jax.jit, static_argnames="k")
def loss(policy: jax.Array, teacher: jax.Array, k: int) -> jax.Array:
    """Of logits."""
    return top_k_reverse_kl(jax.nn.log_softmax(policy), top_tokens(jax.nn.log_softmax(teacher), k))


loss_and_gradient = jax.jit(jax.value_and_grad(loss), static_argnames="k")


@pytest.mark.parametrize("k", [1, 3, 10, VOCABULARY])
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_are_those_of_float64(seed: int, k: int):
    policy, teacher = logits(seed)
    wanted, gradient = reverse_kl(policy, teacher, k)
    with jax.numpy_dtype_promotion("strict"):
        value, found = loss_and_gradient(policy, teacher, k=k)
    assert value == pytest.approx(wanted, abs=1e-6)
    np.testing.assert_allclose(found, gradient, atol=1e-6)


def test_with_the_whole_vocabulary_it_is_trls():
    student, teacher = (jnp.asarray(TRL["given"][name]) for name in ("student", "teacher"))

    @jax.jit
    @jax.value_and_grad
    def mean(x):
        return jnp.mean(loss(x, teacher, k=teacher.shape[-1]))

    value, gradient = mean(student)
    assert value == pytest.approx(TRL["distill"]["loss"], abs=1e-6)
    np.testing.assert_allclose(gradient, TRL["distill"]["gradient"], atol=1e-6)


def test_a_tiny_tail_keeps_its_digits():
    """The teacher's other tokens have a probability that 1 - Σ of the others does not show."""
    teacher = np.array([20.0, 1.0, 0.5, 0.0], np.float32)
    top = top_tokens(jax.nn.log_softmax(jnp.asarray(teacher)), 1)
    wanted = np.log(np.exp(log_softmax(teacher))[1:].sum())
    assert wanted < np.log(1e-7)
    assert float(top.tail) == pytest.approx(wanted, abs=1e-5)


def test_tokens_that_the_policy_does_not_know_count_nothing():
    """A teacher's embedding may be longer; such a token has no probability under the policy."""
    policy, teacher = logits(4)
    longer = np.append(teacher, [9.0]).astype(np.float32)
    shifted = np.append(policy, [-1e30]).astype(np.float32)
    top = top_tokens(jax.nn.log_softmax(jnp.asarray(longer)), 4)
    assert VOCABULARY in top.ids
    short, whole = (
        top_k_reverse_kl(jax.nn.log_softmax(jnp.asarray(x)), top) for x in (policy, shifted)
    )
    assert float(short) == pytest.approx(float(whole), abs=1e-6)


@pytest.mark.parametrize("certain", [50.0, 1e30])
@pytest.mark.parametrize("k", [1, 4])
def test_loss_and_gradient_are_finite_for_certain_policies_and_teachers(certain: float, k: int):
    one, other = jnp.zeros(4).at[0].set(certain), jnp.zeros(4).at[1].set(certain)
    for policy, teacher in ((one, other), (one, one), (one, jnp.zeros(4)), (jnp.zeros(4), one)):
        value, gradient = loss_and_gradient(policy, teacher, k=k)
        assert np.isfinite(value) and np.isfinite(gradient).all()
        assert value >= -1e-6 and (policy is not teacher or value < 1e-6)


ROWS, LENGTH, EMBED, PADDED = 3, 14, 6, 16


@pytest.mark.parametrize("chunk", [4, 100])
def test_chunks_of_hidden_states_give_what_whole_logits_do(chunk: int):
    """Values, and gradients of hidden states and head, with a padded vocabulary and a temperature."""
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(0, 0.5, (ROWS, LENGTH, EMBED)), jnp.float32)
    head, other = (jnp.asarray(rng.normal(size=(EMBED, PADDED)), jnp.float32) for _ in range(2))
    targets = jnp.zeros((ROWS, LENGTH), jnp.int32)
    how = {"vocab_size": VOCABULARY, "temperature": 0.7}
    top = top_token_logprobs(hidden, other.T, 3, chunk=chunk, **how)
    assert top.ids.shape == top.logprobs.shape == (ROWS, LENGTH, 3) and top.ids.max() < VOCABULARY
    of_teacher = np.asarray(hidden, np.float64) @ np.asarray(other, np.float64)
    logprobs = log_softmax(of_teacher[..., :VOCABULARY] / 0.7)
    log_q = np.take_along_axis(logprobs, np.asarray(top.ids), -1)
    np.testing.assert_allclose(top.logprobs, -np.sort(-logprobs)[..., :3], atol=1e-5)

    @partial(jax.value_and_grad, argnums=(0, 1))
    def chunked(hidden, head):
        *_, kl = token_logprobs(hidden, targets, head.T, **how, chunk=chunk, teacher=top)
        return kl.sum()

    @partial(jax.value_and_grad, argnums=(0, 1))
    def plain(hidden, head):
        logprobs = jax.nn.log_softmax((hidden @ head)[..., :VOCABULARY] / 0.7)
        p = jnp.take_along_axis(jnp.exp(logprobs), top.ids, -1)
        rest, rest_q = 1 - p.sum(-1), 1 - jnp.exp(log_q).sum(-1)
        return (p * (jnp.log(p) - log_q)).sum() + (rest * jnp.log(rest / rest_q)).sum()

    found = jax.jit(chunked)(hidden, head)
    with jax.enable_x64(True):  # in float32, 1 - Σ would lose digits
        wanted = jax.jit(plain)(*(np.asarray(x, np.float64) for x in (hidden, head)))
    for value, expected in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=2e-5)
