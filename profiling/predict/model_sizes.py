"""How many weights a model has, and what its kernels move, by the share of one device."""

from collections.abc import Iterator

from pat_jax.models.config import ModelConfig
from pat_jax.profiling.predict.kernel_model import BYTES


def passes(model: ModelConfig, tokens: int, tp: int, kv_ways: int) -> Iterator[int]:
    """Bytes of each kernel of a layer that is not a product: read and written once."""
    for _ in range(2):  # norms: the residual and the input, both read and written
        yield BYTES * 4 * tokens * model.embed_dim
    yield BYTES * 2 * tokens * sum(widths_of(model, tp, kv_ways))  # rotation, and into the cache
    if model.qk_norm:
        yield BYTES * 2 * tokens * sum(heads_of(model, tp, kv_ways)) * model.head_dim
    yield BYTES * 3 * tokens * model.mlp_dim // tp  # activation: two halves into one


def heads_of(model: ModelConfig, tp: int, kv_ways: int) -> tuple[int, int]:
    """Query and KV heads of one device."""
    return model.padded_num_heads // tp, model.num_kv_heads // kv_ways


def widths_of(model: ModelConfig, tp: int, kv_ways: int) -> tuple[int, int]:
    """Widths of the queries, and of the keys and values, of one device."""
    heads, kv_heads = heads_of(model, tp, kv_ways)
    return heads * model.head_dim, 2 * kv_heads * model.head_dim


def weight_bytes(model: ModelConfig, per_number: float = BYTES) -> float:
    """Bytes of the matrices; norms are too small to count.

    Args:
      per_number: of the layers' matrices. Embedding and head are not kept in fewer than bfloat16's.
    """
    layers = model.num_layers * layer_weights(model)
    return per_number * layers + max(per_number, BYTES) * _end_weights(model)


def num_weights(model: ModelConfig) -> int:
    """Number of weights of all matrices, the embedding's and the head's padding included."""
    return model.num_layers * layer_weights(model) + _end_weights(model)


def _end_weights(model: ModelConfig) -> int:
    """Of the embedding and the head."""
    return (1 if model.tie_embeddings else 2) * model.padded_vocab_size * model.embed_dim


def layer_weights(model: ModelConfig) -> int:
    """Number of weights of the matrices of one layer."""
    queries, keys_and_values = widths_of(model, 1, 1)
    return (2 * queries + keys_and_values + 3 * model.mlp_dim) * model.embed_dim
