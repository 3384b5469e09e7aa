"""Whatever finite log-probabilities a broken policy has, an update by them is finite."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_jax.rl.algorithm.kl import estimate_kl
from pat_jax.rl.algorithm.policy_loss import PolicyLoss

LENGTH = 6  # tokens of the one row
EPSILON, DUAL_CLIP, BETA = 0.2, 3.0, 0.05

CLIPS = (1 - EPSILON, 1 + EPSILON, DUAL_CLIP)

# From a certain token to the logit that stands for a masked one, and beyond what exp can take.
logprob = st.one_of(
    st.floats(-120, 0, width=32, allow_subnormal=False),
    st.floats(-(2.0**127), 0, width=32, allow_subnormal=False),
    st.sampled_from([-88.8, -20, -1e30]),
)
row = st.lists(logprob, min_size=LENGTH, max_size=LENGTH)


@jax.jit
def loss_and_gradient(logprobs, old, reference, advantage):
    weights = jnp.full((1, LENGTH), 1 / LENGTH)
    columns = {"advantages": jnp.full_like(weights, advantage), "behavior_logprobs": old}
    columns |= {"old_logprobs": old, "reference_logprobs": reference}

    def loss(x):
        return PolicyLoss(epsilon=EPSILON, epsilon_high=EPSILON, delta=DUAL_CLIP, beta=BETA)(
            x, old, columns, weights
        )

    (value, sums), gradient = jax.value_and_grad(loss, has_aux=True)(logprobs)
    return value, sums, gradient


def expected(logprobs, old, reference, advantage) -> tuple[float, np.ndarray]:
    """Loss and gradient of the clamped formula, token by token in float64."""
    loss, gradient = 0.0, np.zeros(LENGTH)
    for t, (new, before, frozen) in enumerate(zip(logprobs, old, reference, strict=True)):
        log_ratio = min(max(new - before, -20), 20)
        ratio, is_free = np.exp(log_ratio), log_ratio == new - before
        clipped = min(max(ratio, 1 - EPSILON), 1 + EPSILON)
        gain = min(ratio * advantage, clipped * advantage)
        if advantage < 0:
            gain = max(gain, DUAL_CLIP * advantage)
        is_cut = gain != ratio * advantage
        away = min(max(frozen - new, -20), 20)
        loss += (BETA * (np.exp(away) - away - 1) - gain) / LENGTH
        gradient[t] -= ratio * advantage * (is_free and not is_cut) / LENGTH
        gradient[t] += BETA * (1 - np.exp(away)) * (away == frozen - new) / LENGTH
    return loss, gradient


@given(row, row, row, st.sampled_from([-3.0, -0.5, 0.0, 2.0]))
@settings(max_examples=200, deadline=None)
def test_loss_gradient_and_metrics_are_finite_at_any_finite_log_probabilities(
    new, old, reference, advantage
):
    arrays = [np.array(values, np.float32) for values in (new, old, reference)]
    new_row, old_row, reference_row = (x[None] for x in arrays)
    value, sums, gradient = loss_and_gradient(
        new_row, old_row, reference_row, jnp.float32(advantage)
    )
    for found in (value, gradient, *jax.tree.leaves(sums)):
        assert np.isfinite(found).all()
    in_float64 = [x.astype(np.float64) for x in arrays]
    wanted, wanted_gradient = expected(in_float64[0], in_float64[1], in_float64[2], advantage)
    is_at_kink = np.isclose(np.abs(arrays[0] - arrays[1].astype(np.float64)), 20, atol=1e-4)
    is_at_kink |= np.isclose(np.abs(arrays[2] - arrays[0].astype(np.float64)), 20, atol=1e-4)
    np.testing.assert_allclose(value, wanted, rtol=2e-5, atol=1e-5)
    compared = ~is_at_kink & ~_near_the_clip(arrays[0], arrays[1])
    np.testing.assert_allclose(
        gradient[0][compared], wanted_gradient[compared], rtol=2e-4, atol=1e-5
    )


def _near_the_clip(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Where rounding decides on which side of the clip a ratio is."""
    ratio = np.exp(np.clip(new.astype(np.float64) - old, -20, 20))
    return np.any([np.isclose(ratio, x, rtol=1e-4) for x in CLIPS], axis=0)


def test_k3_is_clamped_on_both_sides_and_flat_beyond():
    far = jnp.array([[-1e30, -500.0, 500.0, 1e30]])
    value, gradient = jax.value_and_grad(lambda x: estimate_kl(jnp.zeros((1, 4)), x).sum())(far)
    ends = np.expm1(-20.0) + 20, np.expm1(20.0) - 20
    np.testing.assert_allclose(value, 2 * sum(ends), rtol=1e-6)
    np.testing.assert_array_equal(gradient, 0)
