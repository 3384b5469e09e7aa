"""A policy whose master weights are kept in bfloat16, on devices: memory, transfer and resumption."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_equal
from trainers import CHAIN, host_weights, make_trainer, started, updated

from pat_jax.layout.layout import shard_bytes
from pat_jax.rl.algorithm.optimizer import make_optimizer
from pat_jax.rl.algorithm.update import TrainState
from pat_jax.training.trainer import Trainer

pytestmark = pytest.mark.slow  # a trainer of its own, and many updates
LAYOUT = CHAIN["dp4tp2"]
RATE = 1e-4  # of a step of AdamW: next to nothing of a weight's last bit


def trainer_of(weight_dtype: jnp.dtype, **options: Any) -> Trainer:
    optimizer = make_optimizer(learning_rate=RATE, total_steps=100, moment_dtype="bfloat16")
    return make_trainer(LAYOUT, optimizer=optimizer, weight_dtype=weight_dtype, **options)


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return trainer_of(jnp.bfloat16, dtype=jnp.bfloat16)


def begun(trainer: Trainer) -> TrainState:
    """From weights that bfloat16 has."""
    dtype = trainer.trained.weight_dtype
    weights = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(dtype), host_weights())
    return started(trainer, weights)


def test_weights_move_in_the_mean_as_float32_ones_do(trainer: Trainer):
    exact = trainer_of(jnp.float32)
    ends = [updated(each, begun(each), steps=8)[0].params for each in (trainer, exact)]
    begin = begun(trainer).params
    moved = [
        np.concatenate(
            [
                (np.asarray(b, np.float64) - np.asarray(a, np.float64)).ravel()
                for a, b in zip(jax.tree.leaves(begin), jax.tree.leaves(end), strict=True)
            ]
        )
        for end in ends
    ]
    # The rounding of one weight is as large as all that it moves: what both have in common shows over
    # all of them.
    slope = moved[0] @ moved[1] / (moved[1] @ moved[1])
    assert 0.9 < slope < 1.1


def test_what_stays_is_half_and_gradients_are_float32(trainer: Trainer):
    exact = trainer_of(jnp.float32)
    weights = shard_bytes(trainer.abstract_params)
    assert (
        2 * weights
        == shard_bytes(exact.abstract_params)
        == shard_bytes(trainer.trained.abstract_gradients)
    )
    assert shard_bytes(exact.resident) - shard_bytes(trainer.resident) == weights


@pytest.mark.parametrize("name", list(CHAIN))
def test_what_arrives_at_the_rollout_are_these_weights(trainer: Trainer, name: str):
    """`transfer` compares checksums."""
    params = updated(trainer, begun(trainer))[0].params
    received = trainer.transfer(params, CHAIN[name])
    assert_trees_all_equal(jax.device_get(received), jax.device_get(params))
