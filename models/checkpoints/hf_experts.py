"""Reads and writes the fields of config.json that describe a mixture of experts."""

from pat_jax.models.checkpoints.hf_families import BIGMAC, MIXTRAL, Family
from pat_jax.models.checkpoints.json_fields import CHECK, Fields
from pat_jax.models.config import ExpertsConfig, ModelConfig

LATENT = "moe_latent_size"  # width of BigMac's experts, under the name that Nemotron-H gives it
MOST_LAYERS = 1000
_COUNTS = ("num_experts", "num_local_experts")  # two names of one field
_AUX_LOSS_COEF = 0.001  # transformers' default; no loss is added here


def read_experts(fields: Fields, family: Family) -> ExpertsConfig:
    """Returns the experts that config.json describes. Raises UserError if a field is wrong."""
    num_experts = _num_experts(fields)
    per_tok = fields.integer("num_experts_per_tok")
    if per_tok > num_experts:
        raise fields.error("num_experts_per_tok", f"at most num_experts ({num_experts})", CHECK)
    if family is MIXTRAL:
        return ExpertsConfig(num_experts, per_tok, fields.integer("intermediate_size"))
    return ExpertsConfig(
        num_experts,
        per_tok,
        fields.integer("moe_intermediate_size"),
        norm_topk_prob=fields.boolean("norm_topk_prob", False),
        dense_layers=_dense_layers(fields),
        latent_dim=_latent_dim(fields) if family is BIGMAC else 0,
    )


def _latent_dim(fields: Fields) -> int:
    embed_dim = fields.integer("hidden_size")
    latent_dim = fields.integer(LATENT)
    if latent_dim >= embed_dim:
        raise fields.error(LATENT, f"less than hidden_size ({embed_dim})", CHECK)
    return latent_dim


def _num_experts(fields: Fields) -> int:
    """Returns the number of experts. Qwen3 uses the first name of `_COUNTS`; transformers 5 writes
    the second for every family."""
    first, second = _COUNTS
    if not fields.has(second):
        return fields.integer(first)
    num_experts = fields.integer(second)
    if fields.has(first) and fields.integer(first) != num_experts:
        raise fields.error(first, f"the number of {second} ({num_experts})", CHECK)
    return num_experts


def _dense_layers(fields: Fields) -> tuple[int, ...]:
    """Returns the layers without experts: those in `mlp_only_layers`, and all that are not every
    `decoder_sparse_step`-th."""
    num_layers = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    step = fields.integer("decoder_sparse_step", 1)
    named = fields.values["mlp_only_layers"] if fields.has("mlp_only_layers") else []
    if not isinstance(named, list) or not all(
        type(layer) is int and 0 <= layer < num_layers for layer in named
    ):
        expected = f"a list of layers' numbers, each of 0 to {num_layers - 1}"
        raise fields.error("mlp_only_layers", expected, CHECK)
    dense = {layer for layer in range(num_layers) if layer in named or (layer + 1) % step}
    if len(dense) == num_layers:
        name = "mlp_only_layers" if named else "decoder_sparse_step"
        raise fields.error(name, f"one of {num_layers} layers left that has experts", CHECK)
    return tuple(sorted(dense))


def experts_fields(config: ModelConfig, experts: ExpertsConfig) -> dict[str, object]:
    """Returns the fields of config.json that describe a model's experts."""
    fields: dict[str, object] = {
        "num_experts_per_tok": experts.num_experts_per_tok,
        "output_router_logits": False,
        "router_aux_loss_coef": _AUX_LOSS_COEF,
    }
    if config.architecture == MIXTRAL.model_type:
        return fields | {"num_local_experts": experts.num_experts, "router_jitter_noise": 0.0}
    if config.architecture == BIGMAC.model_type:
        fields[LATENT] = experts.latent_dim
    return fields | {
        "num_experts": experts.num_experts,
        "moe_intermediate_size": experts.expert_dim,
        "norm_topk_prob": experts.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(experts.dense_layers),
    }
