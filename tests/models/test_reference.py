"""Logits equal those of transformers on stored random checkpoints (see make_reference.py)."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from pat_jax.models.checkpoints.hf_load import check_checkpoint, load_params
from pat_jax.models.policy import Policy

REFERENCE = Path(__file__).parent / "reference"
CASES = (
    "llama",
    "llama-tied",
    "qwen2",
    "qwen2-tied",
    "qwen3",
    "qwen3-tied",
    "qwen3_moe",
    "qwen3_moe-tied",
    "mixtral",
    "mixtral-tied",
)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case):
    config = check_checkpoint(REFERENCE / case)
    policy = Policy.from_config(config)
    params = load_params(REFERENCE / case, policy, None, jnp.float32)
    expected = load_file(REFERENCE / case / "expected.safetensors")
    tokens = jnp.asarray(expected["tokens"])
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    model = policy.bind(params)
    logits = np.asarray(model.logits(model(tokens, positions).hidden))[..., : config.vocab_size]

    assert np.ptp(expected["logits"]) > 1, "the reference is too flat to tell models apart"
    largest = np.abs(expected["logits"]).max()
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-5 * largest, rtol=0)
