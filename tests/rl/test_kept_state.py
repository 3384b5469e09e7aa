"""Moments in bfloat16: the rounding by exact arithmetic, the optimizer by one in float32."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pat_jax.rl.algorithm.low_precision import KeptState, kept_in_bfloat16, round_stochastically
from pat_jax.rl.algorithm.optimizer import make_optimizer

finite = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False).filter(
    lambda x: abs(x) < 3.3e38  # what lies beyond rounds to infinity, as to nearest
)


def neighbours(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two bfloat16 values around each float32, toward zero and away; equal where it is one."""
    bits = x.view(np.uint32)
    inner = (bits & np.uint32(0xFFFF0000)).view(np.float32)
    outer = ((bits & np.uint32(0xFFFF0000)) + np.uint32(0x10000)).view(np.float32)
    return inner, np.where(inner == x, x, outer)


@given(arrays.arrays(np.float32, 7, elements=finite), st.integers(0, 2**31 - 1))
def test_a_value_becomes_one_of_its_neighbours(values: np.ndarray, seed: int):
    rounded = round_stochastically(jnp.asarray(values), jax.random.key(seed))
    assert rounded.dtype == jnp.bfloat16
    got = np.asarray(rounded).astype(np.float32)
    inner, outer = neighbours(values)
    assert np.all((got == inner) | (got == outer))


@pytest.mark.parametrize("value", [1.001, -1.001, 0.999, 3.1e-5, -7e20])
def test_the_mean_is_the_value(value: float):
    """By a binomial distribution: 2^16 draws, five of its deviations."""
    count = 2**16
    x = np.float32(value)
    inner, outer = (float(side[0]) for side in neighbours(np.array([x])))
    share = (float(x) - inner) / (outer - inner)  # that goes outward
    draws = round_stochastically(jnp.full(count, x), jax.random.key(1))
    outward = np.mean(np.asarray(draws).astype(np.float64) == outer)
    assert 0 < share < 1 and abs(outward - share) < 5 * (share * (1 - share) / count) ** 0.5


def test_what_has_no_neighbours_stays():
    values = [np.inf, -np.inf, np.nan, 0.0, -0.0, 1.0, -256.0]
    rounded = round_stochastically(jnp.array(values), jax.random.key(0))
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(rounded).astype(np.float32), values)


def test_small_changes_add_up():
    """A second moment that decays by 0.1 % a step: to nearest bfloat16 it would stay where it is."""
    inner = optax.ema(0.999, debias=False)
    kept = kept_in_bfloat16(inner)
    params = {"w": jnp.zeros(4096)}
    state: Any = kept.init(params)
    exact: Any = inner.init(params)
    step, exact_step = jax.jit(kept.update), jax.jit(inner.update)
    for gradient in [1.0] * 50 + [0.0] * 200:
        grads = {"w": jnp.full(4096, gradient)}
        _, state = step(grads, state)
        _, exact = exact_step(grads, exact)
    assert isinstance(state, KeptState) and int(state.count) == 250
    inner_state: Any = state.inner
    ours, theirs = inner_state.ema["w"], exact.ema["w"]
    assert ours.dtype == jnp.bfloat16 and theirs.dtype == jnp.float32
    assert float(ours.astype(jnp.float32).mean()) == pytest.approx(float(theirs[0]), rel=5e-3)


def test_it_learns_as_with_float32_moments():
    """A noisy least-squares problem: both come as near to its solution."""
    rng = np.random.default_rng(0)
    inputs, solution = jnp.array(rng.normal(size=(256, 8))), rng.normal(size=8)
    targets = inputs @ solution + 0.1 * rng.normal(size=256)

    def error(moment_dtype: Literal["float32", "bfloat16"]) -> float:
        optimizer = make_optimizer(
            learning_rate=0.05, total_steps=400, schedule="cosine", moment_dtype=moment_dtype
        )

        def loss(params, rows):
            return jnp.mean((inputs[rows] @ params["w"] - targets[rows]) ** 2)

        @jax.jit
        def step(params, state, rows):
            updates, state = optimizer.update(jax.grad(loss)(params, rows), state, params)
            return optax.apply_updates(params, updates), state

        params: Any = {"w": jnp.zeros(8)}
        state = optimizer.init(params)
        for i in range(400):
            params, state = step(params, state, jnp.arange(16) + 16 * (i % 16))
        return float(jnp.linalg.norm(params["w"] - solution))

    assert error("bfloat16") < 1.2 * error("float32") < 0.1
