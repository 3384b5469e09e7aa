"""The optimizer: its schedule, what it decays, and what is kept in bfloat16."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from chex import assert_trees_all_equal
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pat_jax.rl.algorithm.optimizer import (
    KeptState,
    decay_mask,
    in_float32,
    kept_in_bfloat16,
    make_optimizer,
    make_schedule,
    round_stochastically,
)
from pat_jax.rl.algorithm.policy_loss import PolicyLoss
from pat_jax.rl.algorithm.predict import ModelFunctions, Predictor
from pat_jax.rl.algorithm.update import TrainState, Update, zero_gradients
from pat_jax.rl.batches.batches import to_supervised_batch


def test_norms_and_biases_are_not_decayed_whatever_their_shape():
    matrix, vector = jnp.ones((2, 2)), jnp.ones(2)
    params = {
        "layers": [{"query": matrix, "query_bias": matrix, "key_norm": matrix, "scale": vector}],
        "embedding": matrix,
    }
    assert decay_mask(params) == {
        "layers": [{"query": True, "query_bias": False, "key_norm": False, "scale": False}],
        "embedding": True,
    }


def test_the_schedule_warms_up_and_decays():
    options = {"learning_rate": 2.0, "warmup_steps": 4, "total_steps": 12}
    constant = make_schedule(schedule="constant", **options)
    assert [float(constant(i)) for i in (0, 1, 3, 4, 100)] == [0.5, 1.0, 2.0, 2.0, 2.0]
    cosine = make_schedule(schedule="cosine", **options)
    rates = [float(cosine(i)) for i in (0, 3, 4, 6, 8, 12, 100)]
    quarter = 1 + np.cos(np.pi / 4)
    np.testing.assert_allclose(rates, [0.5, 2.0, 2.0, quarter, 1.0, 0.0, 0.0], atol=1e-6)


def test_the_rate_on_the_host_is_that_of_the_program():
    options = {"learning_rate": 3e-4, "warmup_steps": 7, "total_steps": 90}
    for name in ("constant", "cosine"):
        rate = make_schedule(schedule=name, **options)
        there = jax.jit(rate)(jnp.arange(100))
        here = [rate(i) for i in range(100)]
        assert not any(isinstance(x, jax.Array) for x in here)
        np.testing.assert_allclose(np.array(here), there, rtol=1e-5, atol=1e-10)


# --- moments and weights in bfloat16 ----------------------------------------------------------------

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
    rounded = jax.jit(round_stochastically)(values, jax.random.key(seed))
    assert rounded.dtype == jnp.bfloat16
    got = np.asarray(rounded).astype(np.float32)
    inner, outer = neighbours(values)
    assert np.all((got == inner) | (got == outer))


@pytest.mark.parametrize("value", [-1.001, 0.999, 3.1e-5, -7e20])
def test_the_mean_is_the_value(value: float):
    """By a binomial distribution: 2^16 draws, five of its deviations."""
    count = 2**16
    x = np.float32(value)
    inner, outer = (float(side[0]) for side in neighbours(np.array([x])))
    share = (float(x) - inner) / (outer - inner)  # that goes outward
    draws = jax.jit(round_stochastically)(jnp.full(count, x), jax.random.key(1))
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


VOCAB, EMBED, WIDTH = 8, 16, 4096
LOSS = PolicyLoss(is_on_policy=True)


def make_update(optimizer: optax.GradientTransformation) -> Update:
    """Of a model that looks up its tokens, and computes in bfloat16."""

    def forward(params, tokens, positions, routes):
        del positions, routes
        return params["embedding"][tokens].astype(jnp.bfloat16), {}

    model = ModelFunctions(forward, lambda params: params["head"])
    return Update(Predictor(model, VOCAB, logit_tokens=4), optimizer, LOSS)


@functools.cache
def descent() -> tuple[TrainState, Callable]:
    """Weights of 1 in bfloat16, and the step that takes gradients off them."""
    update = make_update(optax.sgd(1.0))
    return update.init({"w": jnp.ones(WIDTH, jnp.bfloat16)}), jax.jit(update.apply_step)


def test_many_steps_too_small_for_the_last_bit_move_weights_by_their_sum():
    """Below 1 bfloat16 counts by 1/256: each step is a fortieth of that, and to nearest nothing."""
    state, step = descent()
    grads = {"w": jnp.full(WIDTH, 1e-4)}
    nearest = (state.params["w"].astype(jnp.float32) - grads["w"]).astype(jnp.bfloat16)
    assert (nearest == 1).all()
    for _ in range(500):
        state, _, is_applied = step(state, grads)
        assert is_applied
    assert state.params["w"].dtype == jnp.bfloat16
    moved = 1 - in_float32(state.params)["w"]
    # Of each weight 500 draws, all but independent, of 1/256 with probability 0.0256.
    deviation = (500 * 0.0256) ** 0.5 / 256
    assert float(moved.mean()) == pytest.approx(0.05, abs=5 * deviation / WIDTH**0.5)
    assert float(moved.std()) == pytest.approx(deviation, rel=0.1)


def test_steps_draw_anew_and_one_that_is_left_out_moves_nothing():
    start, step = descent()
    grads = {"w": jnp.full(WIDTH, 1e-3)}
    first, _, _ = step(start, grads)
    # From the same weights, one step later.
    later, _, _ = step(TrainState(start.params, first.opt_state, first.step), grads)
    share = float(jnp.mean(first.params["w"] == later.params["w"]))
    assert 0.4 < share < 0.8  # 0.256 of each move
    kept, _, is_applied = step(first, {"w": jnp.full(WIDTH, jnp.nan)})
    assert not is_applied
    assert_trees_all_equal(kept, first)


def test_moments_and_gradients_stay_float32_and_are_those_of_the_same_float32_weights():
    """A token that comes 4,000 times: added up one by one in bfloat16 its gradient would stand still."""
    update = make_update(make_optimizer(learning_rate=1e-3, total_steps=10))
    rng = np.random.default_rng(0)
    low = {
        "embedding": jnp.asarray(rng.normal(size=(VOCAB, EMBED)), jnp.bfloat16),
        "head": jnp.asarray(rng.normal(size=(VOCAB, EMBED)), jnp.bfloat16),
    }
    shown = [(rng.integers(0, 2, 250), rng.integers(0, 2, 250)) for _ in range(8)]
    (micro,) = to_supervised_batch(shown, micro_shapes=[(8, 512)])

    def gradients(params):
        return jax.jit(update.grad_step)(params, micro, zero_gradients(params), update.zero_sums())[
            0
        ]

    ours, theirs = gradients(low), gradients(in_float32(low))
    assert {x.dtype for x in jax.tree.leaves(ours)} == {jnp.dtype("float32")}
    assert_trees_all_equal(ours, theirs)
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(ours)) > 0
    states = [jax.eval_shape(update.init, params) for params in (low, in_float32(low))]
    assert states[0].opt_state == states[1].opt_state
