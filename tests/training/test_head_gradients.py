"""Gradients of the head's loss in every kind of layout, against those of whole logits by the model alone."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from chex import assert_trees_all_close
from trainers import CHAIN, CONFIG, IN_GROUPS, LENGTH, ROWS, micro_batches, weights_of

from pat_jax.layout.layout import Layout
from pat_jax.models.policy import Params, Policy
from pat_jax.programs.programs import Key
from pat_jax.rl.algorithm.policy_loss import PolicyLoss
from pat_jax.rl.algorithm.predict import Predictor
from pat_jax.rl.algorithm.update import Update
from pat_jax.training.passes import model_functions
from pat_jax.training.trainable_params import TrainableParams
from pat_jax.training.trainer import Trainer
from pat_jax.training.transfer import Receivers

TEMPERATURE, COEF, CHUNK = 0.8, 0.1, 3  # chunks of three positions do not divide a row
LOSS = PolicyLoss(is_on_policy=True, entropy_coef=COEF)
POLICIES = {
    tied: Policy.from_config(replace(CONFIG, tie_embeddings=tied)) for tied in (False, True)
}


def found(policy: Policy, layout: Layout) -> Params:
    """The gradient of a micro-batch by the trainer's program, on the host."""
    model = model_functions(policy, layout, jnp.float32)
    tokens = CHUNK * ROWS // layout.split.dp
    predictor = Predictor(model, CONFIG.vocab_size, TEMPERATURE, logit_tokens=tokens)
    update = Update(predictor, optax.sgd(1.0), LOSS)
    held = TrainableParams(policy, layout)
    shapes = [(ROWS, LENGTH)]
    trainer = Trainer(held, update, Receivers(jnp.dtype(jnp.float32)), micro_shapes=shapes)
    params = jax.device_put(weights_of(policy), trainer.shardings)
    grads, sums = trainer["zero_gradients"](params), trainer["zero_sums"]()
    program = trainer.programs[Key("grad", layout.split, ROWS, LENGTH)]
    grads, _ = program({}, params, update.read(next(micro_batches())), grads, sums)
    of_groups = held.gradients.groups is not None
    return jax.tree.map(lambda x: np.asarray(x).sum(0) if of_groups else np.asarray(x), grads)


@cache
def wanted(tied: bool) -> Any:
    policy, micro = POLICIES[tied], next(micro_batches())
    taken = jnp.roll(jnp.asarray(micro.tokens), -1, axis=1)[..., None]

    @jax.jit
    @jax.grad
    def gradient(params: Params) -> jax.Array:
        model = policy.bind(params)
        logits = model.logits(model(micro.tokens, micro.positions).hidden)
        logprobs = jax.nn.log_softmax(logits[..., : CONFIG.vocab_size] / TEMPERATURE)
        entropy = -(jnp.exp(logprobs) * logprobs).sum(-1)
        picked = jnp.take_along_axis(logprobs, taken, -1)[..., 0]
        value = micro.columns["advantages"] * picked + COEF * entropy
        return -jnp.sum(micro.weights * value)

    return jax.device_get(gradient(weights_of(policy)))


@pytest.mark.parametrize(
    ("tied", "layout"),
    [
        pytest.param(True, CHAIN["dp8tp1"], id="dp8tp1-tied"),
        pytest.param(False, CHAIN["dp4tp2"], id="dp4tp2"),
        pytest.param(True, CHAIN["dp1tp8"], id="dp1tp8-tied"),
        pytest.param(False, IN_GROUPS[2], id="groups-of-2"),
    ],
)
def test_gradients_are_those_of_whole_logits(tied: bool, layout: Layout):
    gradient = found(POLICIES[tied], layout)
    assert_trees_all_close(gradient, wanted(tied), rtol=1e-5, atol=1e-6)
