"""Attention, in Flax NNX.

Query heads are stored as [kv_heads, queries_per_kv]: head h reads KV head h // queries_per_kv, and
a layout may split the two axes separately (KV heads first, then the queries that share one).
Padding adds query heads of zeros to each KV head; nothing reads or trains these heads.
"""

from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from pat_jax.models.cache.paged_layer import LayerCache
from pat_jax.models.config import ModelConfig
from pat_jax.models.kernels.kernel_choice import ANYWHERE, Kernels
from pat_jax.models.kernels.row_attention import attend_rows
from pat_jax.models.layers import Rotation, linear
from pat_jax.models.parameters import Keys, normal, ones, padded, param, zeros
from pat_jax.models.partition import Partition
from pat_jax.models.projected import Projected, in_parts

Cache = TypeVar("Cache", bound=LayerCache)

# Axis names of the queries, and of the keys and values.
QUERIES = ("batch", None, "kv_heads", "queries_per_kv", None)
CONTEXT = ("batch", "kv_heads", None, None)


class Attention(nnx.Module):
    def __init__(self, config: ModelConfig, *, keys: Keys):
        embed = config.embed_dim
        kv = config.num_kv_heads
        group = config.padded_queries_per_kv
        dim = config.head_dim
        heads = ("kv_heads", "queries_per_kv", None)
        of_kv = ("kv_heads", None, "embed")
        real = config.queries_per_kv  # further query heads of a KV head are padding
        self.query = param(
            keys,
            (kv, group, dim, embed),
            (*heads, "embed"),
            padded(normal(embed), (kv, real, dim, embed)),
            contracted=1,
        )
        self.key = param(keys, (kv, dim, embed), of_kv, normal(embed), contracted=1)
        self.value = param(keys, (kv, dim, embed), of_kv, normal(embed), contracted=1)
        into_residual = normal(config.num_heads * dim, 2 * config.num_layers)
        self.out = param(
            keys,
            (embed, kv, group, dim),
            ("embed", *heads),
            padded(into_residual, (embed, kv, real, dim)),
            contracted=3,
        )
        if config.attention_bias:
            self.query_bias = param(keys, (kv, group, dim), heads, zeros)
            self.key_bias = param(keys, (kv, dim), ("kv_heads", None), zeros)
            self.value_bias = param(keys, (kv, dim), ("kv_heads", None), zeros)
        if config.qk_norm:
            self.query_norm = param(keys, (dim,), (None,), ones)
            self.key_norm = param(keys, (dim,), (None,), ones)
        self.config = config

    def __call__(
        self,
        x: Float[Array, "rows length embed"],
        positions: Int[Array, "rows length"],
        rotation: Rotation,
        cache: Cache | None,
        partition: Partition,
    ) -> tuple[Float[Array, "rows length embed"], Cache | None]:
        projected = self._project(x, rotation, partition.kernels if cache is not None else ANYWHERE)
        if cache is None:
            queries, keys, values = projected.finished()
            queries = partition.constrain(queries, *QUERIES)
            attended = partition.on_shards(
                partial(attend_rows, kernels=partition.kernels),
                [
                    (queries, QUERIES),
                    (jnp.swapaxes(keys, 1, 2), CONTEXT),
                    (jnp.swapaxes(values, 1, 2), CONTEXT),
                    (positions, ("batch", None)),
                ],
                QUERIES,
            )
        else:
            attended, cache = cache.attend(projected, positions, partition.kernels)
        attended = self._without_padding(attended, partition)
        out = linear(attended, self.out.get_value(), contracted=3)
        return partition.sum(out, "kv_heads", "queries_per_kv"), cache

    def _without_padding(self, attended: Array, partition: Partition) -> Array:
        """Returns `attended` with zeros for padding heads: so their weights' gradients are zero."""
        config = self.config
        here = attended.shape[3]
        if config.padded_queries_per_kv == config.queries_per_kv:
            return attended
        query = partition.shard_index("queries_per_kv") * here + jnp.arange(here)
        return jnp.where((query < config.queries_per_kv)[None, None, None, :, None], attended, 0)

    def _project(self, x: Array, rotation: Rotation, kernels: Kernels) -> Projected:
        norms = (self.query_norm[...], self.key_norm[...]) if self.config.qk_norm else None
        weights = [each.get_value() for each in (self.query, self.key, self.value)]
        has_bias = self.config.attention_bias
        parts = ()
        if kernels.adds_parts and not has_bias and all(isinstance(w, jax.Array) for w in weights):
            parts = in_parts(x, weights)
        queries, keys, values = (linear(x, weight) for weight in weights)
        if has_bias:
            queries += self.query_bias[...].astype(x.dtype)[None, None]
            keys += self.key_bias[...].astype(x.dtype)[None, None]
            values += self.value_bias[...].astype(x.dtype)[None, None]
        eps = self.config.norm_eps
        return Projected(queries, keys, values, rotation, norms, eps, parts)
