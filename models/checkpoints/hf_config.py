"""Reads config.json of a Hugging Face checkpoint into a `ModelConfig`, and writes it back.

Knows which fields the supported architectures have. Does not know any tensor.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from pat_jax.common.errors import UserError, shown
from pat_jax.common.json_text import JsonError, parse_json
from pat_jax.models.config import ExpertsConfig, ModelConfig, RopeScaling

CONFIG_FILE = "config.json"
_FULL_ATTENTION = "full_attention"  # the one supported type of layers
MOST = 2**31 - 1  # largest size
MOST_LAYERS = 1000
LARGEST_NUMBER = 1e30


@dataclass(frozen=True)
class _Family:
    model_type: str  # `model_type` in config.json, `architecture` in ModelConfig
    class_name: str
    attention_bias: bool = False
    qk_norm: bool = False
    has_experts: bool = False
    norm_eps: float = 1e-6  # default of the field in config.json, as is `rope_theta`
    rope_theta: float = 10_000.0


_QWEN3_MOE = _Family("qwen3_moe", "Qwen3MoeForCausalLM", qk_norm=True, has_experts=True)
_MIXTRAL = _Family(
    "mixtral", "MixtralForCausalLM", has_experts=True, norm_eps=1e-5, rope_theta=1_000_000.0
)
# Qwen3-MoE with experts narrower than the layer; transformers has no such model. The field of the
# experts' width has the name that Nemotron-H gives it.
_BIGMAC = replace(_QWEN3_MOE, model_type="bigmac", class_name="BigMacForCausalLM")
_LATENT = "moe_latent_size"
_FAMILIES = (
    _Family("llama", "LlamaForCausalLM"),
    _Family("qwen2", "Qwen2ForCausalLM", attention_bias=True),
    _Family("qwen3", "Qwen3ForCausalLM", qk_norm=True),
    _QWEN3_MOE,
    _MIXTRAL,
    _BIGMAC,
)

# Fields that change what is computed, with the one value that is implemented, also the default.
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
_CHECK = "check the checkpoint's config.json"
_COUNTS = ("num_experts", "num_local_experts")  # two names of one field
_AUX_LOSS_COEF = 0.001  # transformers' default; no loss is added here


@dataclass(frozen=True)
class _Fields:
    """A JSON object whose fields are read with their type checked. JSON null counts as absent."""

    values: Mapping[str, Any]
    path: Path
    prefix: str = ""

    def error(self, name: str, expected: str, advice: str) -> UserError:
        got = f"is {shown(self.values[name])}" if name in self.values else "is missing"
        return UserError(
            f"{self.path}: field '{self.prefix}{name}' {got}, expected {expected}; {advice}."
        )

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, default: int | None = None, most: int = MOST) -> int:
        value = self.values[name] if self.has(name) else default
        if type(value) is not int or not 1 <= value <= most:
            expected = f"a positive integer up to {most:,}"
            raise self.error(name, expected, _CHECK)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values[name] if self.has(name) else default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, "a number", _CHECK)
        if not 0 < value <= LARGEST_NUMBER:
            expected = f"a positive number up to {LARGEST_NUMBER:g}"
            raise self.error(name, expected, _CHECK)
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.values[name] if self.has(name) else default
        if type(value) is not bool:
            raise self.error(name, "true or false", _CHECK)
        return value

    def section(self, name: str) -> "_Fields":
        value = self.values[name]
        if not isinstance(value, dict):
            raise self.error(name, "an object", _CHECK)
        return _Fields(value, self.path, f"{self.prefix}{name}.")


def read_json_object(path: Path) -> dict[str, Any]:
    """Returns the object of a JSON file.

    Raises:
      UserError: the file is not one JSON object; the message names the line.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: it is no file, expected one JSON object; download it again.")
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except JsonError as error:
        raise UserError(
            f"{path}{error.at()}: {error}, expected one JSON object; repair the file or download it "
            "again."
        ) from error
    except OSError as error:
        raise UserError(f"{path}: the file cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: byte {error.start} is not UTF-8 text, expected one JSON object; download the file again."
        ) from error
    if not isinstance(content, dict):
        raise UserError(
            f"{path}: the file holds a JSON {type(content).__name__}, expected one JSON object; "
            f"repair the file or download it again."
        )
    return content


def read_config(directory: str | Path) -> ModelConfig:
    """Returns the model that `directory/config.json` describes.

    Raises:
      UserError: the file is missing or damaged, or describes an unsupported model.
    """
    path = Path(directory) / CONFIG_FILE
    if not path.parent.is_dir():
        raise UserError(
            f"{path.parent}: there is no such directory, expected a Hugging Face checkpoint directory."
        )
    if not path.is_file():
        raise UserError(
            f"{path}: the file is missing, expected in every Hugging Face checkpoint directory; "
            f"give the directory that holds config.json and the model's safetensors files."
        )
    fields = _Fields(read_json_object(path), path)
    family = _family(fields)
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
        max_position=fields.integer("max_position_embeddings"),
        experts=_experts(fields, family) if family.has_experts else None,
    )


def _family(fields: _Fields) -> _Family:
    supported = ", ".join(family.class_name for family in _FAMILIES)
    advice = "choose a checkpoint of one of these architectures"
    if fields.has("architectures"):  # a bare config saved by transformers has only a model_type
        for family in _FAMILIES:
            if fields.values["architectures"] == [family.class_name]:
                return family
        raise fields.error("architectures", f"one of {supported}", advice)
    for family in _FAMILIES:
        if fields.values.get("model_type") == family.model_type:
            return family
    raise fields.error("model_type", f"the type of one of {supported}", advice)


def _refuse_unsupported(fields: _Fields, family: _Family) -> None:
    advice = "choose a checkpoint without it, as it is not implemented"
    for name, only in _ONLY_VALUES.items():
        if fields.has(name) and fields.values[name] != only:
            raise fields.error(name, json.dumps(only), advice)
    # Qwen2.5 has biases whatever this field says; in Llama and Qwen3 it adds one to the output too.
    if not family.attention_bias and fields.boolean("attention_bias", False):
        raise fields.error("attention_bias", "false", advice)
    if family is not _BIGMAC and fields.has(_LATENT):
        raise fields.error(_LATENT, f"null in {family.model_type}", _CHECK)
    # In the other families `use_sliding_window` switches it on.
    if family is _MIXTRAL and fields.has("sliding_window"):
        raise fields.error("sliding_window", "null", advice)
    layer_types = fields.values.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != _FULL_ATTENTION for kind in layer_types):
        raise fields.error("layer_types", f"{_FULL_ATTENTION!r} for every layer", advice)


def _heads(fields: _Fields, family: _Family) -> tuple[int, int, int]:
    embed_dim, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_kv_heads = fields.integer(
        "num_key_value_heads", num_heads if family.model_type == "llama" else None
    )
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads",
            f"a divisor of num_attention_heads ({num_heads})",
            _CHECK,
        )
    if family.model_type == "qwen3":
        head_dim = fields.integer("head_dim", 128)
    else:
        head_dim = fields.integer("head_dim", embed_dim // num_heads)
    if head_dim % 2:
        raise fields.error("head_dim", "an even number", "rotary positions pair up its numbers")
    return num_heads, num_kv_heads, head_dim


def _experts(fields: _Fields, family: _Family) -> ExpertsConfig:
    num_experts = _num_experts(fields)
    per_tok = fields.integer("num_experts_per_tok")
    if per_tok > num_experts:
        raise fields.error("num_experts_per_tok", f"at most num_experts ({num_experts})", _CHECK)
    if family is _MIXTRAL:
        return ExpertsConfig(num_experts, per_tok, fields.integer("intermediate_size"))
    return ExpertsConfig(
        num_experts,
        per_tok,
        fields.integer("moe_intermediate_size"),
        norm_topk_prob=fields.boolean("norm_topk_prob", False),
        dense_layers=_dense_layers(fields),
        latent_dim=_latent_dim(fields) if family is _BIGMAC else 0,
    )


def _latent_dim(fields: _Fields) -> int:
    embed_dim = fields.integer("hidden_size")
    latent_dim = fields.integer(_LATENT)
    if latent_dim >= embed_dim:
        raise fields.error(_LATENT, f"less than hidden_size ({embed_dim})", _CHECK)
    return latent_dim


def _num_experts(fields: _Fields) -> int:
    """Qwen3 uses the first name of `_COUNTS`; transformers 5 writes the second for every family."""
    first, second = _COUNTS
    if not fields.has(second):
        return fields.integer(first)
    num_experts = fields.integer(second)
    if fields.has(first) and fields.integer(first) != num_experts:
        raise fields.error(first, f"the number of {second} ({num_experts})", _CHECK)
    return num_experts


def _dense_layers(fields: _Fields) -> tuple[int, ...]:
    """Layers without experts: those in `mlp_only_layers`, and all but every n-th."""
    num_layers = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    step = fields.integer("decoder_sparse_step", 1)
    named = fields.values["mlp_only_layers"] if fields.has("mlp_only_layers") else []
    if not isinstance(named, list) or not all(
        type(layer) is int and 0 <= layer < num_layers for layer in named
    ):
        expected = f"a list of layers' numbers, each of 0 to {num_layers - 1}"
        raise fields.error("mlp_only_layers", expected, _CHECK)
    dense = {layer for layer in range(num_layers) if layer in named or (layer + 1) % step}
    if len(dense) == num_layers:
        name = "mlp_only_layers" if named else "decoder_sparse_step"
        raise fields.error(name, f"one of {num_layers} layers left that has experts", _CHECK)
    return tuple(sorted(dense))


def _rope(fields: _Fields, family: _Family) -> tuple[float, RopeScaling | None]:
    """Reads `rope_scaling` and `rope_theta`, or the `rope_parameters` that replaced both."""
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


def _scaling(fields: _Fields, rope: _Fields) -> RopeScaling:
    original = "original_max_position_embeddings"  # preferred outside of the object
    scaling = RopeScaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position=(fields if fields.has(original) else rope).integer(original),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        expected = f"more than low_freq_factor ({scaling.low_freq_factor})"
        raise rope.error("high_freq_factor", expected, _CHECK)
    return scaling


def to_hf_config(config: ModelConfig, dtype: jnp.dtype) -> dict[str, object]:
    """Returns config.json for weights stored in `dtype`; transformers 4.5x and 5.x can read it.

    Raises:
      ValueError: the architecture's config.json cannot express the configuration.
    """
    family = next(family for family in _FAMILIES if family.model_type == config.architecture)
    if (config.attention_bias, config.qk_norm) != (family.attention_bias, family.qk_norm):
        raise ValueError(
            f"{config.architecture} has attention_bias={family.attention_bias} and qk_norm={family.qk_norm}; "
            f"this configuration has {config.attention_bias} and {config.qk_norm}, which no checkpoint can say."
        )
    if (config.experts is not None) != family.has_experts:
        raise ValueError(
            f"{config.architecture} has {'' if family.has_experts else 'no '}experts; this configuration has "
            f"experts={config.experts}, which no checkpoint can say."
        )
    fields: dict[str, object] = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _scaling_fields(config.rope_scaling),
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": jnp.dtype(dtype).name,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,  # Llama's class would otherwise assume 1 and 2
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family.model_type == "llama":
        return fields | {"attention_bias": False, "mlp_bias": False}
    if config.experts is not None:
        fields |= _experts_fields(config, config.experts)
    if family is _MIXTRAL:
        return fields | {"sliding_window": None}
    return fields | {"use_sliding_window": False, "sliding_window": None}


def _experts_fields(config: ModelConfig, experts: ExpertsConfig) -> dict[str, object]:
    fields: dict[str, object] = {
        "num_experts_per_tok": experts.num_experts_per_tok,
        "output_router_logits": False,
        "router_aux_loss_coef": _AUX_LOSS_COEF,
    }
    is_bigmac = config.architecture == _BIGMAC.model_type
    if is_bigmac or config.architecture == _QWEN3_MOE.model_type:
        if is_bigmac != (experts.latent_dim > 0):
            raise ValueError(
                f"{config.architecture} has {'a' if is_bigmac else 'no'} latent_dim; this configuration has "
                f"{experts}, which no checkpoint can say."
            )
        if is_bigmac:
            fields[_LATENT] = experts.latent_dim
        return fields | {
            "num_experts": experts.num_experts,
            "moe_intermediate_size": experts.expert_dim,
            "norm_topk_prob": experts.norm_topk_prob,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(experts.dense_layers),
        }
    if experts != ExpertsConfig(experts.num_experts, experts.num_experts_per_tok, config.mlp_dim):
        raise ValueError(
            f"mixtral has experts of mlp_dim={config.mlp_dim} hidden units in every layer, and weights that sum "
            f"to one; this configuration has {experts}, which no checkpoint can say."
        )
    return fields | {"num_local_experts": experts.num_experts, "router_jitter_noise": 0.0}


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
