"""The KL in the loss, as an exact mean over all tokens: whose gradient it has."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pat_jax.config.learning import AlgorithmConfig
from pat_jax.rl.algorithm.losses import ENTROPY, LOGPROBS
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
def test_the_ratio_gives_the_gradient_of_the_kl_that_is_reported(
    spread: float, is_on_policy: bool, estimator: str
):
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
