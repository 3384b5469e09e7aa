"""What a loss is made of, and what it must reduce to; test_algorithms.py has the papers' formulas."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from chex import assert_trees_all_close
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_jax.rl.algorithm.kl import estimate_kl
from pat_jax.rl.algorithm.losses import ENTROPY, LOGPROBS, Loss, PerToken, Reduction, Sums
from pat_jax.rl.algorithm.policy_loss import PolicyLoss

LENGTHS = (9, 1, 14, 6)  # tokens of each sequence; row 1 has one, no row starts at position 0
ROWS, LENGTH = len(LENGTHS), 16
MASK = np.array([[1 <= t < 1 + n for t in range(LENGTH)] for n in LENGTHS])


def token_weights(aggregation: str) -> np.ndarray:
    counts = MASK.sum(axis=1, keepdims=True)
    if aggregation == "token":
        return MASK / MASK.sum()
    return MASK / (counts * ROWS)


def arrays(seed: int = 3) -> tuple[np.ndarray, ...]:
    """logprobs, old, reference and advantages; the ratios lie on both sides of both clips.

    Advantages differ within a row, as those of a critic do."""
    rng = np.random.default_rng(seed)
    logprobs = -rng.exponential(1.5, (ROWS, LENGTH))
    old = logprobs + 0.4 * rng.normal(size=(ROWS, LENGTH))
    reference = logprobs + 0.4 * rng.normal(size=(ROWS, LENGTH))
    return logprobs, old, reference, rng.normal(size=(ROWS, LENGTH))


def jax_arrays(*values):
    return tuple(jnp.asarray(value, jnp.float32) for value in values)


@partial(jax.jit, static_argnums=0)
def compiled(loss: Loss, logprobs, entropy, columns, weights):
    """The loss and its sums, and its gradients in log-probabilities, entropies and columns."""

    def value(logprobs, entropy, columns):
        return loss({LOGPROBS: logprobs, ENTROPY: entropy}, columns, weights)

    with jax.numpy_dtype_promotion("strict"):
        return jax.value_and_grad(value, (0, 1, 2), has_aux=True)(logprobs, entropy, columns)


def run(
    loss: Loss, logprobs: PerToken, weights: PerToken, entropy: PerToken | None = None, **columns
) -> tuple[jax.Array, jax.Array, Sums]:
    """The loss, its gradient in the log-probabilities, and the sums. A column that is not given is 0."""
    zeros = jnp.zeros_like(weights)
    filled = dict.fromkeys(loss.needs, zeros) | columns
    (value, sums), gradients = compiled(
        loss, logprobs, zeros if entropy is None else entropy, filled, weights
    )
    return value, gradients[0], sums


def test_metrics_are_the_weighted_means_of_their_definitions():
    logprobs, old, reference, advantages = arrays(1)
    entropy, behavior = np.random.default_rng(2).uniform(0, 3, (2, ROWS, LENGTH))
    lp, old32, ref32, adv32, w32, ent32, beh32 = jax_arrays(
        logprobs, old, reference, advantages, token_weights("token"), entropy, behavior
    )
    loss = PolicyLoss(epsilon=0.1, epsilon_high=0.3, beta=0.1)
    columns = {"old_logprobs": old32, "reference_logprobs": ref32, "behavior_logprobs": beh32}
    _, _, sums = run(loss, lp, w32, ent32, advantages=adv32, **columns)
    ratio = np.exp(logprobs - old)
    clipped = ((ratio > 1.3) & (advantages > 0)) | ((ratio < 0.9) & (advantages < 0))
    to_reference = np.exp(reference - logprobs)
    assert 0 < clipped[MASK].mean() < 1
    expected = {
        "clip_fraction": clipped[MASK].mean(),
        "clip_fraction_low": (clipped & (ratio < 1))[MASK].mean(),
        "clip_fraction_high": (clipped & (ratio > 1))[MASK].mean(),
        "ratio_mean": ratio[MASK].mean(),
        "ratio_min": ratio[MASK].min(),
        "ratio_max": ratio[MASK].max(),
        "approx_kl": (ratio - np.log(ratio) - 1)[MASK].mean(),
        "reference_kl": (to_reference - np.log(to_reference) - 1)[MASK].mean(),
        "entropy": entropy[MASK].mean(),
        "cross_entropy": -logprobs[MASK].mean(),
        "behavior_gap": np.abs(old - behavior)[MASK].mean(),
        "behavior_gap_max": np.abs(old - behavior)[MASK].max(),
    }
    metrics = loss.summary([jax.device_get(sums)])
    assert metrics.keys() == {"loss", *expected} == set(loss.metrics)
    assert metrics["clip_fraction_low"] > 0 < metrics["clip_fraction_high"]
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)


def test_of_several_steps_the_metrics_are_means_and_extremes():
    loss = PolicyLoss()
    first, second = (
        {name: np.array(value, np.float32) for name in loss.zero_sums()}
        | {"weight": np.array(weight, np.float32)}
        for value, weight in ((1.0, 2.0), (4.0, 0.5))
    )
    for name, value in loss.summary([first, second]).items():
        sums, means = (1.0 + 4.0) / 2, (1.0 / 2.0 + 4.0 / 0.5) / 2
        wanted = {Reduction.SUM: sums, Reduction.MEAN: means, Reduction.MAX: 4.0}
        wanted[Reduction.MIN] = 1.0
        assert value == wanted[loss.metrics[name]], name
    nothing = jax.device_get(loss.zero_sums())
    assert all(np.isnan(value) for value in loss.summary([nothing, nothing]).values())
    assert loss.summary([first, nothing, second]) == loss.summary([first, second])


def test_only_the_policy_and_its_entropy_have_a_gradient():
    logprobs, old, reference, advantages = arrays(5)
    lp, old32, ref, adv, w = jax_arrays(
        logprobs, old, reference, advantages, token_weights("token")
    )
    columns = {"advantages": adv, "behavior_logprobs": old32}
    columns |= {"old_logprobs": old32, "reference_logprobs": ref}
    for coefficient in (0.0, 0.5):
        loss = PolicyLoss(beta=0.1, entropy_coef=coefficient)
        _, (_, of_entropy, of_columns) = compiled(loss, lp, lp, columns, w)
        np.testing.assert_allclose(of_entropy, -coefficient * w, rtol=1e-6)
        assert len(of_columns) == 4
        jax.tree.map(lambda gradient: np.testing.assert_array_equal(gradient, 0), of_columns)


def test_k3_keeps_its_digits_where_the_policies_nearly_agree():
    delta = np.full((1, 1), 2.0**-12, np.float32)
    np.testing.assert_allclose(estimate_kl(0 * delta, delta), delta**2 / 2, rtol=1e-2)


LOSS = PolicyLoss(beta=0.1)


def run_all(logprobs, old, reference, advantages, weights) -> tuple[np.ndarray, Sums]:
    """Gradient and sums, with every column."""
    columns = {"advantages": advantages, "old_logprobs": old, "reference_logprobs": reference}
    _, gradient, sums = run(LOSS, logprobs, weights, old, behavior_logprobs=reference, **columns)
    return np.asarray(gradient), dict(sums)


def test_masked_equals_sliced_whatever_the_masked_positions_hold():
    logprobs, old, reference, advantages = arrays(7)
    weights = token_weights("sequence")
    kept = np.where(np.arange(LENGTH) < 4, weights, 0.0)
    every = logprobs, old, reference, advantages
    sliced = jax_arrays(*(x[:, :4] for x in (*every, kept)))
    poisons = np.nan, -np.inf, 1e30, np.nan
    poisoned = [np.where(kept > 0, x, bad) for x, bad in zip(every, poisons, strict=True)]
    gradient, sums = run_all(*jax_arrays(*poisoned, kept))
    expected_gradient, expected = run_all(*sliced)
    np.testing.assert_allclose(gradient[:, :4], expected_gradient, rtol=1e-6)
    np.testing.assert_array_equal(gradient[:, 4:], 0)
    assert_trees_all_close(sums, expected, rtol=1e-5)


def test_nothing_in_the_loss_gives_zero_not_nan():
    logprobs, old, reference, advantages = arrays(8)
    gradient, sums = run_all(*jax_arrays(logprobs, old, reference, advantages, 0 * logprobs))
    assert np.isinf(sums.pop("ratio_min"))
    for value in (gradient, *jax.tree.leaves(sums)):
        np.testing.assert_array_equal(value, 0)


# --- whatever finite log-probabilities a broken policy has ------------------------------------------

TOKENS = 6  # tokens of the one row
EPSILON, DUAL_CLIP, BETA = 0.2, 3.0, 0.05
CLIPS = (1 - EPSILON, 1 + EPSILON, DUAL_CLIP)
CLAMPED = PolicyLoss(epsilon=EPSILON, epsilon_high=EPSILON, delta=DUAL_CLIP, beta=BETA)

# From a certain token to the logit that stands for a masked one, and beyond what exp can take.
logprob = st.one_of(
    st.floats(-120, 0, width=32, allow_subnormal=False),
    st.floats(-(2.0**127), 0, width=32, allow_subnormal=False),
    st.sampled_from([-88.8, -20, -1e30]),
)
row = st.lists(logprob, min_size=TOKENS, max_size=TOKENS)


def expected(logprobs, old, reference, advantage) -> tuple[float, np.ndarray]:
    """Loss and gradient of the clamped formula, token by token in float64."""
    loss, gradient = 0.0, np.zeros(TOKENS)
    for t, (new, before, frozen) in enumerate(zip(logprobs, old, reference, strict=True)):
        log_ratio = min(max(new - before, -20), 20)
        ratio, is_free = np.exp(log_ratio), log_ratio == new - before
        clipped = min(max(ratio, 1 - EPSILON), 1 + EPSILON)
        gain = min(ratio * advantage, clipped * advantage)
        if advantage < 0:
            gain = max(gain, DUAL_CLIP * advantage)
        is_cut = gain != ratio * advantage
        away = min(max(frozen - new, -20), 20)
        loss += (BETA * (np.exp(away) - away - 1) - gain) / TOKENS
        gradient[t] -= ratio * advantage * (is_free and not is_cut) / TOKENS
        gradient[t] += BETA * (1 - np.exp(away)) * (away == frozen - new) / TOKENS
    return loss, gradient


@given(row, row, row, st.sampled_from([-3.0, -0.5, 0.0, 2.0]))
@settings(max_examples=100, deadline=None)
def test_loss_gradient_and_metrics_are_finite_at_any_finite_log_probabilities(
    new, old, reference, advantage
):
    arrays = [np.array(values, np.float32) for values in (new, old, reference)]
    of_new, of_old, of_reference = jax_arrays(*(x[None] for x in arrays))
    weights = jnp.full((1, TOKENS), 1 / TOKENS)
    columns = {"advantages": jnp.full_like(weights, advantage), "behavior_logprobs": of_old}
    columns |= {"old_logprobs": of_old, "reference_logprobs": of_reference}
    value, gradient, sums = run(CLAMPED, of_new, weights, of_old, **columns)
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
