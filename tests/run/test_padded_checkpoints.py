"""A checkpoint of arrays that are padded for some devices, restored for others."""

from dataclasses import asdict, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pat_jax.common.errors import UserError
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Policy
from pat_jax.rl.optimizer import make_optimizer
from pat_jax.rl.update import TrainState
from pat_jax.run.checkpoint import Checkpointer

CONFIG = ModelConfig("qwen2", 61, 24, 48, 1, 9, 3, 4, attention_bias=True, vocab_multiple=8)
OPTIMIZER = make_optimizer(learning_rate=1e-3, total_steps=9)


def state_of(policy: Policy) -> TrainState:
    """Weights and moments that differ everywhere, and zeros in what pads heads."""
    params = policy.init(0)
    moments = jax.tree.map(lambda x: 2 * x, OPTIMIZER.init(params))
    named = jax.tree.map(lambda x: x + 0, params)
    filled = jax.tree.map(
        lambda x: named if jax.tree.structure(x) == jax.tree.structure(params) else x,
        moments,
        is_leaf=lambda x: jax.tree.structure(x) == jax.tree.structure(params),
    )
    return TrainState(params, filled, jnp.int32(3))


@pytest.mark.parametrize("saved, wanted", [(4, 1), (1, 4), (4, 2), (2, 3)])
def test_parameters_and_moments_come_back_with_other_padding(
    tmp_path: Path, saved: int, wanted: int
):
    there, here = (
        Policy.from_config(replace(CONFIG, query_multiple=n, vocab_multiple=8 * n))
        for n in (saved, wanted)
    )
    with Checkpointer(tmp_path / "a", 2, fingerprint=asdict(there.config)) as checkpoints:
        checkpoints.save(3, state_of(there), {})
        checkpoints.wait()
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state_of(here)
    )
    with Checkpointer(tmp_path / "a", 2, fingerprint=asdict(here.config)) as checkpoints:
        _, found, _ = checkpoints.restore(like)
    expected = jax.tree.leaves(state_of(here))
    for ours, theirs in zip(jax.tree.leaves(found), expected, strict=True):
        real = ours.shape and CONFIG.vocab_size <= ours.shape[0]
        end = CONFIG.vocab_size if real else None
        np.testing.assert_array_equal(
            ours[:end] if ours.ndim else ours, theirs[:end] if theirs.ndim else theirs
        )


def test_another_number_of_heads_is_another_model(tmp_path: Path):
    policy = Policy.from_config(CONFIG)
    with Checkpointer(tmp_path / "a", 2, fingerprint=asdict(CONFIG)) as checkpoints:
        checkpoints.save(1, {"x": jnp.float32(1)}, {})
        checkpoints.wait()
    other = asdict(replace(CONFIG, num_heads=12))
    with (
        Checkpointer(tmp_path / "a", 2, fingerprint=other) as checkpoints,
        pytest.raises(UserError, match=r"num_heads \(9 there, 12 here\)"),
    ):
        checkpoints.restore({"x": jnp.float32(0)})
    assert policy.config.query_multiple == 1
