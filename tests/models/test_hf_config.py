"""config.json: published ones are read as the presets, and every preset survives the round trip."""

import json
from dataclasses import replace

import jax.numpy as jnp
import pytest

from pat_jax.models.checkpoints.hf_config import read_config, to_hf_config
from pat_jax.models.config import RopeScaling
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


@pytest.mark.parametrize(
    ("text", "name"),
    [(LLAMA_3_1_8B, "llama-3.1-8b"), (QWEN_2_5_7B, "qwen2.5-7b"), (QWEN3_0_6B, "qwen3-0.6b")],
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


def test_a_configuration_no_checkpoint_can_say_is_not_written():
    with pytest.raises(ValueError, match="qwen3 has attention_bias=False and qk_norm=True"):
        to_hf_config(replace(preset("qwen3-0.6b"), qk_norm=False), jnp.float32)
