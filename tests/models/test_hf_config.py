"""config.json: published ones are read as the presets, and every preset survives the round trip."""

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from pat_jax.models.checkpoints.hf_config import read_config, to_hf_config
from pat_jax.models.config import ExpertsConfig, ModelConfig, RopeScaling
from pat_jax.models.presets import PRESETS, preset

LLAMA_3_1_8B = """{
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096,
  "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072,
  "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
  "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
  "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3"},
  "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.43.0.dev0", "use_cache": true, "vocab_size": 128256}"""
QWEN_2_5_7B = """{
  "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
  "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02,
  "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 28,
  "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28,
  "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
  "sliding_window": 131072, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.40.1", "use_cache": true, "use_mrope": false,
  "use_sliding_window": false, "vocab_size": 152064}"""
QWEN3_0_6B = """{
  "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
  "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
  "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
  "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
  "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
  "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
  "use_cache": true, "use_sliding_window": false, "vocab_size": 151936}"""

QWEN3_30B_A3B = """{
  "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
  "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
  "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
  "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": true,
  "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
  "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": false,
  "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0,
  "router_aux_loss_coef": 0.001, "sliding_window": null, "tie_word_embeddings": false,
  "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true,
  "use_sliding_window": false, "vocab_size": 151936}"""
MIXTRAL_8X7B = """{
  "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
  "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
  "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
  "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
  "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": false,
  "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
  "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.36.0.dev0", "use_cache": true, "vocab_size": 32000}"""


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (LLAMA_3_1_8B, "llama-3.1-8b"),
        (QWEN_2_5_7B, "qwen2.5-7b"),
        (QWEN3_0_6B, "qwen3-0.6b"),
        (QWEN3_30B_A3B, "qwen3-30b-a3b"),
        (MIXTRAL_8X7B, "mixtral-8x7b"),
    ],
)
def test_published_configurations_are_the_presets(tmp_path, text, name):
    (tmp_path / "config.json").write_text(text)
    assert read_config(tmp_path) == preset(name)


ROPE = {
    "rope_theta": 500.0,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
STRETCH = RopeScaling(8.0, 1.0, 4.0, 64)


@pytest.mark.parametrize(
    ("fields", "theta", "scaling"),
    [
        ({"rope_parameters": {"full_attention": ROPE}}, 500.0, STRETCH),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": 7.0}, "full_attention": ROPE}},
            500.0,
            STRETCH,
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 300.0}}}, 300.0, None),
        ({"rope_theta": 200.0, "rope_parameters": {"full_attention": {}}}, 200.0, None),
        ({"rope_scaling": {}, "rope_parameters": ROPE}, 500.0, STRETCH),
        ({"rope_scaling": {"full_attention": {**ROPE, "rope_type": "default"}}}, 500.0, None),
        (
            {"rope_parameters": ROPE, "original_max_position_embeddings": 128},
            500.0,
            RopeScaling(8.0, 1.0, 4.0, 128),
        ),
    ],
)
def test_rotary_parameters_of_every_form_are_read(tmp_path, fields, theta, scaling):
    plain = {k: v for k, v in json.loads(LLAMA_3_1_8B).items() if not k.startswith("rope")}
    (tmp_path / "config.json").write_text(json.dumps(plain | fields))
    config = read_config(tmp_path)
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize("name", PRESETS)
def test_a_configuration_survives_writing_and_reading(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(preset(name), jnp.bfloat16)))
    assert read_config(tmp_path) == replace(preset(name), vocab_multiple=128)


FIELDS_OF_EXPERTS = ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")


def written(directory: Path, text: str, **fields: object) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(json.loads(text) | fields))
    return read_config(directory)


def test_what_transformers_takes_where_a_field_is_missing(tmp_path):
    text = {k: v for k, v in json.loads(QWEN3_30B_A3B).items() if k not in FIELDS_OF_EXPERTS}
    experts = written(tmp_path, json.dumps(text)).experts
    assert experts == ExpertsConfig(128, 8, 768, norm_topk_prob=False)
    text = {
        k: v for k, v in json.loads(MIXTRAL_8X7B).items() if k not in ("rope_theta", "rms_norm_eps")
    }
    assert written(tmp_path, json.dumps(text)) == preset("mixtral-8x7b")


@pytest.mark.parametrize(
    ("step", "named", "expected"),
    [
        (1, None, ()),
        (1, [2, 0, 2], (0, 2)),
        (2, [], (0, 2, 4)),
        (3, [], (0, 1, 3, 4)),
        (2, [1], (0, 1, 2, 4)),
    ],
)
def test_layers_without_experts_are_those_named_and_all_but_every_nth(
    tmp_path, step, named, expected
):
    fields = {"num_hidden_layers": 6, "decoder_sparse_step": step, "mlp_only_layers": named}
    experts = written(tmp_path, QWEN3_30B_A3B, **fields).experts
    assert experts is not None and experts.dense_layers == expected


def test_the_number_of_experts_has_two_names_and_what_is_off_may_be_said(tmp_path):
    """transformers 5 writes `num_local_experts` for Qwen3 too; Qwen3-Coder says what it lacks."""
    off = {"shared_expert_intermediate_size": 0, "num_shared_experts": None}
    fields = {"num_experts": None, "num_local_experts": 128, **off}
    assert written(tmp_path, QWEN3_30B_A3B, **fields) == preset("qwen3-30b-a3b")
    fields = {"num_experts": 8, "num_local_experts": None}
    assert written(tmp_path, MIXTRAL_8X7B, **fields) == preset("mixtral-8x7b")
