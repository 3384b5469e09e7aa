"""The KV cache: dense rows, one pair of arrays a layer.

A row belongs to one sequence; column s holds the key and value of its token s. What a row's
unused columns hold does not matter: attention never looks past the query's own position.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pat_jax.models.config import ModelConfig

KV_AXES = ("batch", "kv_heads", None, None)


class LayerCache(NamedTuple):
    keys: Float[Array, "rows kv_heads length head_dim"]
    values: Float[Array, "rows kv_heads length head_dim"]

    def write(
        self,
        keys: Float[Array, "rows chunk kv_heads head_dim"],
        values: Float[Array, "rows chunk kv_heads head_dim"],
        start: Int[Array, " rows"],
    ) -> "LayerCache":
        """Puts a chunk of tokens at columns start … start + chunk - 1 of each row.

        The caller keeps start + chunk within the length: an overshoot would be shifted back.
        """
        return LayerCache(_write(self.keys, keys, start), _write(self.values, values, start))


KVCache = tuple[LayerCache, ...]


def _write(cache: Array, chunk: Array, start: Array) -> Array:
    rows = jnp.swapaxes(chunk, 1, 2).astype(cache.dtype)
    update = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (0, at, 0)))
    return update(cache, rows, start)


def kv_cache_shape(config: ModelConfig, rows: int, length: int, dtype: jnp.dtype) -> KVCache:
    """The cache as shapes without arrays, for compilation and for allocating it in place."""
    array: Any = jax.ShapeDtypeStruct((rows, config.num_kv_heads, length, config.head_dim), dtype)
    return tuple(LayerCache(array, array) for _ in range(config.num_layers))
