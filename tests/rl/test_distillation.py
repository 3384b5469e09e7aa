"""On-policy distillation follows the gradient of the reverse KL."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from divergences import VOCABULARY, log_softmax, logits, reverse_kl

from pat_jax.rl.algorithm.distillation import distill_advantages
from pat_jax.rl.algorithm.losses import ENTROPY, LOGPROBS
from pat_jax.rl.algorithm.policy_loss import PolicyLoss


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
