"""Logits equal those of transformers on stored random checkpoints (see make_reference.py)."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from pat_jax.models.checkpoints.hf_load import check_checkpoint, load_params
from pat_jax.models.config import ExpertsConfig, ModelConfig, RopeScaling
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


def test_config_is_read_as_transformers_wrote_it():
    assert check_checkpoint(REFERENCE / "llama") == ModelConfig(
        architecture="llama",
        vocab_size=61,
        embed_dim=32,
        mlp_dim=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rope_theta=100.0,
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64),
        norm_eps=1e-5,
        max_position=256,
    )
    qwen2, qwen3 = check_checkpoint(REFERENCE / "qwen2-tied"), check_checkpoint(REFERENCE / "qwen3")
    assert (qwen2.attention_bias, qwen2.qk_norm, qwen2.tie_embeddings) == (True, False, True)
    assert (qwen3.attention_bias, qwen3.qk_norm, qwen3.head_dim, qwen3.rope_theta) == (
        False,
        True,
        16,
        1000.0,
    )
    mixed, mixtral = (
        check_checkpoint(REFERENCE / "qwen3_moe"),
        check_checkpoint(REFERENCE / "mixtral"),
    )
    assert (mixed.mlp_dim, mixed.experts) == (48, ExpertsConfig(8, 3, 16, True, dense_layers=(1,)))
    assert mixtral.experts == ExpertsConfig(4, 2, 48, norm_topk_prob=True)
    shares = check_checkpoint(REFERENCE / "qwen3_moe-tied").experts
    assert shares is not None and not shares.norm_topk_prob
