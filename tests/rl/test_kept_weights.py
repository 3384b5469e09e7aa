"""Master weights in bfloat16: what a step makes of them, and gradients that add up in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from chex import assert_trees_all_equal

from pat_jax.rl.algorithm.low_precision import in_float32
from pat_jax.rl.algorithm.optimizer import make_optimizer
from pat_jax.rl.algorithm.policy_loss import PolicyLoss
from pat_jax.rl.algorithm.update import ModelFunctions, PolicyUpdate, TrainState, zero_gradients
from pat_jax.rl.batches.batches import to_supervised_batch

VOCAB, EMBED, WIDTH = 8, 16, 4096
LOSS = PolicyLoss(is_on_policy=True)


def make_update(optimizer: optax.GradientTransformation) -> PolicyUpdate:
    """Of a model that looks up its tokens, and computes in bfloat16."""

    def forward(params, tokens, positions):
        del positions
        return params["embedding"][tokens].astype(jnp.bfloat16)

    def logits(params, hidden):
        return (hidden @ params["head"].astype(jnp.bfloat16)).astype(jnp.float32)

    return PolicyUpdate(ModelFunctions(forward, logits), optimizer, VOCAB, LOSS, logit_tokens=4)


def weights(value: float, dtype: jnp.dtype) -> TrainState:
    return jax.jit(make_update(optax.sgd(1.0)).init)({"w": jnp.full(WIDTH, value, dtype)})


def test_many_steps_too_small_for_the_last_bit_move_weights_by_their_sum():
    """Below 1 bfloat16 counts by 1/256: each step is a fortieth of that, and to nearest nothing."""
    step = jax.jit(make_update(optax.sgd(1.0)).apply_step)
    state = weights(1.0, jnp.bfloat16)
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
    step = jax.jit(make_update(optax.sgd(1.0)).apply_step)
    grads = {"w": jnp.full(WIDTH, 1e-3)}
    first, _, _ = step(weights(1.0, jnp.bfloat16), grads)
    # From the same weights, one step later.
    later, _, _ = step(
        TrainState(weights(1.0, jnp.bfloat16).params, first.opt_state, first.step), grads
    )
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
        "head": jnp.asarray(rng.normal(size=(EMBED, VOCAB)), jnp.bfloat16),
    }
    shown = [(rng.integers(0, 2, 250), rng.integers(0, 2, 250)) for _ in range(8)]
    (micro,) = to_supervised_batch(shown, micro_shapes=[(8, 512)])

    def gradients(params):
        return jax.jit(update.grad_step)(
            params, micro, zero_gradients(params), update.loss.zero_sums()
        )[0]

    ours, theirs = gradients(low), gradients(in_float32(low))
    assert {x.dtype for x in jax.tree.leaves(ours)} == {jnp.dtype("float32")}
    assert_trees_all_equal(ours, theirs)
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(ours)) > 0
    states = [jax.eval_shape(update.init, params) for params in (low, in_float32(low))]
    assert states[0].opt_state == states[1].opt_state
