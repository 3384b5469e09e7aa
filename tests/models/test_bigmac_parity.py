"""A BigMac model against parts of transformers put together (needs the `parity` extra).

transformers has no such model. Its Nemotron-H has the form of the layer: two shared matrices around
the experts. Its experts and its router are others; Qwen3-MoE's take their places.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from pat_jax.models.checkpoints.hf_export import export
from pat_jax.models.checkpoints.hf_load import check_checkpoint
from pat_jax.models.policy import Policy
from tests.lossless import EXPERTS, lively_params

torch = pytest.importorskip("torch", reason="needs the `parity` extra")

from both_sides import our_logits, ours_of, their_logits  # noqa: E402 - they import torch
from transformers import NemotronHConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: E402
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE  # noqa: E402
from transformers.models.qwen3_moe.modeling_qwen3_moe import (  # noqa: E402
    Qwen3MoeExperts,
    Qwen3MoeTopKRouter,
)


def latent_form(config: Qwen3MoeConfig, latent_dim: int) -> NemotronHMoE:
    layer = NemotronHMoE(
        NemotronHConfig(
            hidden_size=config.hidden_size,
            n_routed_experts=config.num_experts,
            num_experts_per_tok=config.num_experts_per_tok,
            moe_intermediate_size=config.moe_intermediate_size,
            moe_latent_size=latent_dim,
            moe_shared_expert_intermediate_size=1,
        )
    )
    inner = deepcopy(config)
    inner.hidden_size = latent_dim
    layer.add_module("experts", Qwen3MoeExperts(inner))
    layer.add_module("gate", Qwen3MoeTopKRouter(config))
    for parameter in layer.shared_experts.parameters():
        torch.nn.init.zeros_(parameter)
    return layer


def theirs(directory: Path, latent_dim: int) -> Qwen3MoeForCausalLM:
    """The model of a directory of ours."""
    fields = check_checkpoint(directory)
    assert fields.experts is not None
    head: dict[str, Any] = {"head_dim": fields.head_dim}
    config = Qwen3MoeConfig(
        **head,
        vocab_size=fields.vocab_size,
        hidden_size=fields.embed_dim,
        num_hidden_layers=fields.num_layers,
        num_attention_heads=fields.num_heads,
        num_key_value_heads=fields.num_kv_heads,
        num_experts=fields.experts.num_experts,
        num_experts_per_tok=fields.experts.num_experts_per_tok,
        moe_intermediate_size=fields.experts.expert_dim,
        norm_topk_prob=fields.experts.norm_topk_prob,
        rms_norm_eps=fields.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": fields.rope_theta},
        tie_word_embeddings=fields.tie_embeddings,
    )
    model = Qwen3MoeForCausalLM(config)
    stored = {
        name: torch.from_numpy(x) for name, x in load_file(directory / "model.safetensors").items()
    }
    for i, layer in enumerate(model.model.layers):
        layer.mlp = latent_form(config, latent_dim)
        experts = f"model.layers.{i}.mlp.experts"
        gate, up, down = (
            torch.stack([stored.pop(f"{experts}.{j}.{part}_proj.weight") for j in range(8)])
            for part in ("gate", "up", "down")
        )
        stored |= {
            f"{experts}.gate_up_proj": torch.cat([gate, up], 1),
            f"{experts}.down_proj": down,
        }
    found = model.load_state_dict(stored, strict=False)
    assert not found.unexpected_keys
    assert all(".shared_experts." in name for name in found.missing_keys)
    return model.float().eval()


def test_logits_are_those_of_the_parts_of_transformers(tmp_path):
    """Our directory's tensors have the names that those parts have."""
    policy = Policy.from_config(EXPERTS["bigmac"])
    export(tmp_path / "out", policy, jax.device_put(lively_params(policy)), jnp.float32)
    assert policy.config.experts is not None
    expected = their_logits(theirs(tmp_path / "out", policy.config.experts.latent_dim))
    ours = our_logits(*ours_of(tmp_path / "out"))
    assert np.ptp(expected) > 1
    np.testing.assert_allclose(ours, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
