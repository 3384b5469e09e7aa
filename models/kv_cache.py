"""The KV cache: dense rows, one pair of arrays a layer.

A row belongs to one sequence; column s holds the key and value of its token s. What a row's
unused columns hold does not matter: attention never looks past the query's own position.
"""

from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pat_jax.models.config import ModelConfig
from pat_jax.models.layers import attend

KV_AXES = ("pages", "kv_heads", None, None)


class LayerCache(Protocol):
    """What one layer remembers of the tokens before: all that the model asks of any cache."""

    def attend(
        self,
        queries: Float[Array, "rows length kv_heads queries_per_kv head_dim"],
        keys: Float[Array, "rows length kv_heads head_dim"],
        values: Float[Array, "rows length kv_heads head_dim"],
        positions: Int[Array, "rows length"],
    ) -> tuple[Float[Array, "rows length kv_heads queries_per_kv head_dim"], Self]:
        """Remembers the keys and values of consecutive tokens, then attends: each query to
        everything in its row up to its own position.
        """
        ...


class DenseLayer(NamedTuple):
    """A row of columns for each sequence; column s holds the key and value of its token s."""

    keys: Float[Array, "rows kv_heads length head_dim"]
    values: Float[Array, "rows kv_heads length head_dim"]

    def attend(
        self, queries: Array, keys: Array, values: Array, positions: Array
    ) -> tuple[Array, "DenseLayer"]:
        cache = self.write(keys, values, positions[:, 0])
        return attend(queries, cache.keys, cache.values, positions), cache

    def write(
        self,
        keys: Float[Array, "rows chunk kv_heads head_dim"],
        values: Float[Array, "rows chunk kv_heads head_dim"],
        start: Int[Array, " rows"],
    ) -> "DenseLayer":
        """Puts a chunk of tokens at columns start … start + chunk - 1 of each row.

        The caller keeps start + chunk within the length: an overshoot would be shifted back.
        """
        return DenseLayer(_write(self.keys, keys, start), _write(self.values, values, start))


KVCache = tuple[DenseLayer, ...]


def _write(cache: Array, chunk: Array, start: Array) -> Array:
    rows = jnp.swapaxes(chunk, 1, 2).astype(cache.dtype)
    update = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (0, at, 0)))
    return update(cache, rows, start)


def kv_cache_shape(config: ModelConfig, rows: int, length: int, dtype: jnp.dtype) -> KVCache:
    """The cache as shapes without arrays, for compilation and for allocating it in place."""
    array: Any = jax.ShapeDtypeStruct((rows, config.num_kv_heads, length, config.head_dim), dtype)
    return tuple(DenseLayer(array, array) for _ in range(config.num_layers))
