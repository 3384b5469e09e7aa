"""Reads config.json of a Hugging Face checkpoint into a `ModelConfig`, and writes it back.

Knows which fields the supported architectures have. Does not know any tensor.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp

from pat_jax.common.errors import UserError
from pat_jax.common.json_text import read_json_object
from pat_jax.models.checkpoints.hf_experts import LATENT, MOST_LAYERS, experts_fields, read_experts
from pat_jax.models.checkpoints.hf_families import (
    BIGMAC,
    MIXTRAL,
    Family,
    class_of,
    read_class,
)
from pat_jax.models.checkpoints.json_fields import CHECK, Fields
from pat_jax.models.config import Head, ModelConfig, RopeScaling

CONFIG_FILE = "config.json"
_FULL_ATTENTION = "full_attention"  # the one supported type of layers
_LABEL = "LABEL_0"  # transformers' name of the only label

# Fields that change what is computed, with the only implemented value, which is also the default.
_ONLY_VALUES: Mapping[str, object] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "shared_expert_intermediate_size": 0,
    "num_shared_experts": 0,
    "n_shared_experts": 0,
    "scoring_func": "softmax",
}

# Fields that are written alike for every model.
_OF_EVERY_MODEL: Mapping[str, object] = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": None,  # Llama's class would otherwise assume 1 and 2
    "eos_token_id": None,
    "pad_token_id": None,
}


def read_config(directory: str | Path, head: Head | None = None) -> ModelConfig:
    """Returns the model that `directory/config.json` describes. Raises UserError if the file is
    missing or damaged, if the model is not supported, or if it has a scalar head but `head` is
    `vocab`.

    Args:
      head: the head that the model is to have: `vocab` to generate, `scalar` for a reward model or
        critic, or None for the checkpoint's own head. If the checkpoint has a vocabulary head, a
        new scalar head of zeros without bias replaces it.
    """
    fields = _read_fields(Path(directory) / CONFIG_FILE)
    stored = read_class(fields, head)
    family = stored.family
    _refuse_unsupported(fields, family)
    rope_theta, rope_scaling = _rope(fields, family)
    num_heads, num_kv_heads, head_dim = _heads(fields, family)
    return ModelConfig(
        architecture=family.model_type,
        vocab_size=fields.integer("vocab_size"),
        embed_dim=fields.integer("hidden_size"),
        mlp_dim=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers", most=MOST_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        norm_eps=fields.number("rms_norm_eps", family.norm_eps),
        attention_bias=family.attention_bias,
        qk_norm=family.qk_norm,
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        head=head or stored.of_head.head,
        head_bias=stored.of_head.has_bias,
        max_position=fields.integer("max_position_embeddings"),
        experts=read_experts(fields, family) if family.has_experts else None,
    )


def _read_fields(path: Path) -> Fields:
    if not path.parent.is_dir():
        raise UserError(
            f"{path.parent}: there is no such directory, expected a Hugging Face checkpoint directory."
        )
    if not path.is_file():
        raise UserError(
            f"{path}: the file is missing, expected in every Hugging Face checkpoint directory; "
            f"give the directory that holds config.json and the model's safetensors files."
        )
    return Fields(read_json_object(path), path)


def _refuse_unsupported(fields: Fields, family: Family) -> None:
    advice = "choose a checkpoint without it, as it is not implemented"
    for name, only in _ONLY_VALUES.items():
        if fields.has(name) and fields.values[name] != only:
            raise fields.error(name, json.dumps(only), advice)
    # Qwen2.5 has biases whatever this field says; in Llama and Qwen3 it adds one to the output too.
    if not family.attention_bias and fields.boolean("attention_bias", False):
        raise fields.error("attention_bias", "false", advice)
    if family is not BIGMAC and fields.has(LATENT):
        raise fields.error(LATENT, f"null in {family.model_type}", CHECK)
    # In the other families `use_sliding_window` switches it on.
    if family is MIXTRAL and fields.has("sliding_window"):
        raise fields.error("sliding_window", "null", advice)
    layer_types = fields.values.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != _FULL_ATTENTION for kind in layer_types):
        raise fields.error("layer_types", f"{_FULL_ATTENTION!r} for every layer", advice)


def _heads(fields: Fields, family: Family) -> tuple[int, int, int]:
    embed_dim, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_kv_heads = fields.integer(
        "num_key_value_heads", num_heads if family.model_type == "llama" else None
    )
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads",
            f"a divisor of num_attention_heads ({num_heads})",
            CHECK,
        )
    if family.model_type == "qwen3":
        head_dim = fields.integer("head_dim", 128)
    else:
        head_dim = fields.integer("head_dim", embed_dim // num_heads)
    if head_dim % 2:
        raise fields.error("head_dim", "an even number", "rotary positions pair up its numbers")
    return num_heads, num_kv_heads, head_dim


def _rope(fields: Fields, family: Family) -> tuple[float, RopeScaling | None]:
    """Returns the base and the scaling of rotary positions, from `rope_theta` and `rope_scaling` or
    from `rope_parameters`, which replaced both."""
    theta = fields.number("rope_theta", family.rope_theta)
    names = [
        x for x in ("rope_scaling", "rope_parameters") if fields.has(x) and fields.values[x] != {}
    ]
    if not names:
        return theta, None
    rope = fields.section(names[0])
    theta = rope.number("rope_theta", theta)
    # transformers 5 writes an object for each type of layers; only one type is supported here.
    nested = [name for name, value in rope.values.items() if isinstance(value, dict)]
    if nested or _FULL_ATTENTION in rope.values:
        if not rope.has(_FULL_ATTENTION):
            advice = "choose a checkpoint of full attention, rotated"
            raise rope.error(
                _FULL_ATTENTION, "an object, as all layers here are of that type", advice
            )
        rope = rope.section(_FULL_ATTENTION)
        theta = rope.number("rope_theta", theta)
    type_name = "type" if "type" in rope.values and "rope_type" not in rope.values else "rope_type"
    rope_type = rope.values.get(type_name, "default")
    if rope.has("partial_rotary_factor") and rope.values["partial_rotary_factor"] != 1:
        raise rope.error("partial_rotary_factor", "1.0", "partly rotated heads are not implemented")
    if rope_type == "default":
        return theta, None
    if rope_type != "llama3":
        raise rope.error(
            type_name, "'default' or 'llama3'", "other rotary scalings are not implemented"
        )
    return theta, _scaling(fields, rope)


def _scaling(fields: Fields, rope: Fields) -> RopeScaling:
    original = "original_max_position_embeddings"  # preferred outside of the object
    scaling = RopeScaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position=(fields if fields.has(original) else rope).integer(original),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        expected = f"more than low_freq_factor ({scaling.low_freq_factor})"
        raise rope.error("high_freq_factor", expected, CHECK)
    return scaling


def to_hf_config(config: ModelConfig, dtype: jnp.dtype) -> dict[str, object]:
    """Returns config.json for weights stored in `dtype`; transformers 4.5x and 5.x can read it."""
    written = class_of(config)
    family = written.family
    fields: dict[str, object] = {
        "architectures": [written.name],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _scaling_fields(config.rope_scaling),
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": jnp.dtype(dtype).name,
        **_OF_EVERY_MODEL,
    }
    if config.head == "scalar":
        fields |= {"id2label": {"0": _LABEL}, "label2id": {_LABEL: 0}}
    if config.head_bias:
        fields |= {"classifier_dropout": 0.0}  # else transformers trains the class with 0.1
    if family.model_type == "llama":
        return fields | {"attention_bias": False, "mlp_bias": False}
    if config.experts is not None:
        fields |= experts_fields(config, config.experts)
    if family is MIXTRAL:
        return fields | {"sliding_window": None}
    return fields | {"use_sliding_window": False, "sliding_window": None}


def _scaling_fields(scaling: RopeScaling | None) -> dict[str, object] | None:
    if scaling is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position,
    }
