"""Counts a model's weights, and the bytes that its kernels move on one device.

Stored weights are all weights. Active weights are those that a token is multiplied with: only those
of the few experts that it chooses.
"""

from collections.abc import Iterator

from pat_jax.models.config import ModelConfig
from pat_jax.profiling.predict.kernel_model import BYTES

FLOAT32 = 4  # bytes of a router's logit
ROUTER_PASSES = 3  # a router's logits are written, and read by top-k and by softmax


def passes(
    model: ModelConfig, tokens: int, tp: int, kv_ways: int, *, is_sparse: bool = False
) -> Iterator[float]:
    """Yields the bytes that each elementwise kernel of a layer reads and writes. `expert_passes`
    has those of experts."""
    for _ in range(2):  # norms: the residual and the input, both read and written
        yield BYTES * 4 * tokens * model.embed_dim
    yield BYTES * 2 * tokens * sum(widths_of(model, tp, kv_ways))  # rotation, and into the cache
    if model.qk_norm:
        yield BYTES * 2 * tokens * sum(heads_of(model, tp, kv_ways)) * model.head_dim
    if is_sparse:
        assert model.experts is not None
        yield ROUTER_PASSES * FLOAT32 * tokens * model.experts.num_experts
    else:
        yield BYTES * 3 * tokens * model.mlp_dim // tp  # activation: two halves into one


def expert_passes(model: ModelConfig, tokens: int) -> float:
    """Returns the bytes that a layer's experts move outside of products: to sort rows by expert and
    back, and for the activation. In a decode step the kernel of the products does this itself."""
    assert model.experts is not None
    rows = tokens * model.experts.num_experts_per_tok
    return BYTES * rows * (4 * model.expert_embed_dim + 3 * model.experts.expert_dim)


def heads_of(model: ModelConfig, tp: int, kv_ways: int) -> tuple[int, int]:
    """Returns the numbers of query heads and of KV heads of one device."""
    return model.padded_num_heads // tp, model.num_kv_heads // kv_ways


def widths_of(model: ModelConfig, tp: int, kv_ways: int) -> tuple[int, int]:
    """Returns the widths of the queries, and of the keys and values, of one device."""
    heads, kv_heads = heads_of(model, tp, kv_ways)
    return heads * model.head_dim, 2 * kv_heads * model.head_dim


def weight_bytes(model: ModelConfig, per_number: float = BYTES) -> float:
    """Returns the bytes of the matrices that tensor parallelism divides; norms are too small to
    count. Experts and routers are left out: a device has the same ones in every layout.

    Args:
      per_number: bytes of a number in layers; embedding and head have at least bfloat16's.
    """
    layers = _attention_weights(model) * model.num_layers + _mlp_weights(model) * num_dense(model)
    return per_number * layers + max(per_number, BYTES) * _end_weights(model)


def num_weights(model: ModelConfig) -> int:
    """Returns the number of stored weights of all matrices, padding included."""
    return stored_weights(model) + _end_weights(model)


def _end_weights(model: ModelConfig) -> int:
    is_shared = model.tie_embeddings and model.head == "vocab"
    outputs = 0 if is_shared else model.padded_head_outputs
    return (model.padded_vocab_size + outputs) * model.embed_dim


def stored_weights(model: ModelConfig) -> int:
    """Returns the number of weights of the matrices of all layers."""
    return _layers(model, model.experts.num_experts if model.experts else 0)


def expert_weights(model: ModelConfig) -> int:
    """Returns the number of weights of all experts of all layers."""
    if model.experts is None:
        return 0
    return len(model.sparse_layers) * model.experts.num_experts * _expert_weights(model)


def active_weights(model: ModelConfig) -> int:
    """Returns the number of weights of all layers that a token is multiplied with."""
    return _layers(model, model.experts.num_experts_per_tok if model.experts else 0)


def last_weights(model: ModelConfig) -> int:
    """Returns the active weights in the last matrices (down projections) of MLPs and experts."""
    units = num_dense(model) * model.mlp_dim
    if (experts := model.experts) is not None:
        per_token = experts.latent_dim or experts.num_experts_per_tok * experts.expert_dim
        units += len(model.sparse_layers) * per_token
    return units * model.embed_dim


def num_dense(model: ModelConfig, layers: int | None = None) -> int:
    """Returns the number of layers without experts among the first `layers`, by default all."""
    return sum(not model.is_sparse(i) for i in range(layers or model.num_layers))


def _layers(model: ModelConfig, num_experts: int) -> int:
    found = _attention_weights(model) * model.num_layers + _mlp_weights(model) * num_dense(model)
    if model.experts is not None:
        shared = model.experts.num_experts + 2 * model.experts.latent_dim  # the router's first
        per_layer = shared * model.embed_dim + num_experts * _expert_weights(model)
        found += len(model.sparse_layers) * per_layer
    return found


def _expert_weights(model: ModelConfig) -> int:
    assert model.experts is not None
    return 3 * model.experts.expert_dim * model.expert_embed_dim


def _attention_weights(model: ModelConfig) -> int:
    queries, keys_and_values = widths_of(model, 1, 1)
    return (2 * queries + keys_and_values) * model.embed_dim


def _mlp_weights(model: ModelConfig) -> int:
    return 3 * model.mlp_dim * model.embed_dim
