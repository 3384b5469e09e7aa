"""The one transformer, in Flax NNX. Parameters and activations carry axis names, no mesh.

Query heads are stored as [kv_heads, queries_per_kv]: head h reads KV head h // queries_per_kv, and
a layout may split the two axes separately (KV heads first, then the queries that share one). What
pads the queries of a KV head is heads of zeros: nothing reads them, and nothing trains them.
Weights are stored [*out, *in], as in checkpoints: see `layers.linear`.
"""

from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Int16

from pat_jax.models.cache.kv_cache import LayerCache
from pat_jax.models.config import ModelConfig
from pat_jax.models.experts import ROUTE_DTYPE, Experts, Routed
from pat_jax.models.kernels.row_attention import attend_rows
from pat_jax.models.layer_loop import scanned, unrolled
from pat_jax.models.layers import (
    Rotation,
    angles,
    linear,
    rms_norm,
    rope_frequencies,
    rotate,
    swiglu,
)
from pat_jax.models.parameters import Keys, normal, ones, padded, param, zeros
from pat_jax.models.partition import Partition, Whole
from pat_jax.models.rematerialization import NONE, rematerialized

Cache = TypeVar("Cache", bound=LayerCache)

OfLayer = tuple[nnx.State, Array | None]  # its parameters, and the experts recorded of it
# What splits the dimensions of an attention's inputs.
QUERIES = ("batch", None, "kv_heads", "queries_per_kv", None)
CONTEXT = ("batch", "kv_heads", None, None)


class Attention(nnx.Module):
    def __init__(self, config: ModelConfig, *, keys: Keys):
        embed, kv, group, dim = (
            config.embed_dim,
            config.num_kv_heads,
            config.padded_queries_per_kv,
            config.head_dim,
        )
        heads = ("kv_heads", "queries_per_kv", None)
        of_kv = ("kv_heads", None, "embed")
        real = config.queries_per_kv  # the others of a group are padding
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
        queries, keys, values = self._project(x)
        queries, keys = rotate(queries, rotation), rotate(keys, rotation)
        queries = partition.constrain(queries, *QUERIES)
        if cache is None:
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
            attended, cache = cache.attend(queries, keys, values, positions, partition.kernels)
        attended = self._without_padding(attended, partition)
        out = linear(attended, self.out.get_value(), contracted=3)
        return partition.sum(out, "kv_heads", "queries_per_kv"), cache

    def _without_padding(self, attended: Array, partition: Partition) -> Array:
        """Zeros for what pads a KV head's queries, so that its weights have gradients of zeros."""
        config, here = self.config, attended.shape[3]
        if config.padded_queries_per_kv == config.queries_per_kv:
            return attended
        query = partition.shard_index("queries_per_kv") * here + jnp.arange(here)
        return jnp.where((query < config.queries_per_kv)[None, None, None, :, None], attended, 0)

    def _project(self, x: Array) -> tuple[Array, Array, Array]:
        queries = linear(x, self.query.get_value())
        keys = linear(x, self.key.get_value())
        values = linear(x, self.value.get_value())
        if self.config.attention_bias:
            queries += self.query_bias[...].astype(x.dtype)[None, None]
            keys += self.key_bias[...].astype(x.dtype)[None, None]
            values += self.value_bias[...].astype(x.dtype)[None, None]
        if self.config.qk_norm:
            queries = rms_norm(queries, self.query_norm[...], self.config.norm_eps)
            keys = rms_norm(keys, self.key_norm[...], self.config.norm_eps)
        return queries, keys, values


class MLP(nnx.Module):
    """SwiGLU (arXiv 2002.05202): (silu(x·gate) ⊙ x·up) · down."""

    def __init__(self, config: ModelConfig, *, keys: Keys):
        embed, mlp = config.embed_dim, config.mlp_dim
        self.gate = param(keys, (mlp, embed), ("mlp", "embed"), normal(embed), contracted=1)
        self.up = param(keys, (mlp, embed), ("mlp", "embed"), normal(embed), contracted=1)
        into_residual = normal(mlp, 2 * config.num_layers)
        self.down = param(keys, (embed, mlp), ("embed", "mlp"), into_residual, contracted=1)

    def __call__(self, x: Float[Array, "rows length embed"], partition: Partition) -> Array:
        gated = swiglu(linear(x, self.gate.get_value()), linear(x, self.up.get_value()))
        gated = partition.constrain(gated, "batch", None, "mlp")
        return partition.sum(linear(gated, self.down.get_value()), "mlp")


class Layer(nnx.Module):
    def __init__(self, config: ModelConfig, index: int, *, keys: Keys):
        self.attention_norm = param(keys, (config.embed_dim,), (None,), ones)
        self.attention = Attention(config, keys=keys)
        self.mlp_norm = param(keys, (config.embed_dim,), (None,), ones)
        self.mlp = (Experts if config.is_sparse(index) else MLP)(config, keys=keys)
        self.eps = config.norm_eps

    def __call__(
        self,
        x: Array,
        positions: Array,
        rotation: Rotation,
        cache: Cache | None,
        is_real: Array,
        recorded: Array | None,
        partition: Partition,
    ) -> tuple[Array, Cache | None, Routed | None]:
        with jax.named_scope("attention"):
            normed = rms_norm(x, self.attention_norm[...], self.eps)
            attended, cache = self.attention(normed, positions, rotation, cache, partition)
            x = partition.constrain(x + attended, "batch", None, None)
        with jax.named_scope("mlp"):
            normed, routed = rms_norm(x, self.mlp_norm[...], self.eps), None
            if isinstance(self.mlp, Experts):
                added, routed = self.mlp(normed, is_real, recorded, partition)
            else:
                added = self.mlp(normed, partition)
            return partition.constrain(x + added, "batch", None, None), cache, routed


class Output(NamedTuple):
    """What a transformer makes of tokens."""

    hidden: Float[Array, "rows length embed"]  # behind the final norm
    cache: tuple[Any, ...] | None  # with these tokens written into it
    # Of the layers that have experts, in their order: int16[rows, length, layers, k],
    # float32[layers, num_experts] and float32[rows, length, layers].
    routed: Routed


class Transformer(nnx.Module):
    """Decoder-only transformer of the Llama family; `config` chooses the member."""

    def __init__(self, config: ModelConfig, *, keys: Keys):
        vocab, embed = config.padded_vocab_size, config.embed_dim
        self.embedding = param(keys, (vocab, embed), ("vocab", "embed"), normal(embed))
        self.layers = nnx.List([Layer(config, i, keys=keys) for i in range(config.num_layers)])
        self.final_norm = param(keys, (embed,), (None,), ones)
        if not config.tie_embeddings:
            self.lm_head = param(keys, (vocab, embed), ("vocab", "embed"), normal(embed))
        self.config = config

    def __call__(
        self,
        tokens: Int[Array, "rows length"],
        positions: Int[Array, "rows length"],
        cache: tuple[Cache, ...] | None = None,
        *,
        recorded: Int16[Array, "rows length layers k"] | None = None,
        partition: Partition | None = None,
        dtype: jnp.dtype = jnp.float32,
        remat: str = NONE,
        scan_layers: bool = False,
        depth: int | None = None,
    ) -> Output:
        """What the layers make of tokens; one below 0 is none, and no expert computes it.

        Without a cache a row holds sequences one behind the other, whose positions begin at 0: a
        token sees those before it in its own. With one it sees everything in its row up to its own
        position. With `depth` the model is as if it had so many layers. `remat` is what the
        backward pass keeps of each layer (`rematerialization.py`); with `scan_layers`, and without
        a cache, they run as a loop (`layer_loop.py`).

        Args:
          recorded: the experts that tokens have, of the layers that have any, NOT_RECORDED where
            the routers choose; None: everywhere.
        """
        partition = partition or Whole()
        x = self._embed(tokens, partition).astype(dtype)
        definitions = self._definitions()

        def run(
            layer: OfLayer, x: Array, cache: LayerCache | None
        ) -> tuple[Array, Any, Routed | None]:
            params, recorded = layer
            definition = definitions["router" in params["mlp"]]
            return run_layer(definition, params, x, cache=cache, recorded=recorded)

        run_layer = partial(
            _run_layer,
            positions=positions,
            rotation=angles(positions, rope_frequencies(self.config)),
            is_real=tokens >= 0,
            partition=partition,
            remat=remat,
        )
        layers = self._layers(recorded)[:depth]
        if cache is None:
            run_all = scanned if scan_layers else unrolled

            def without_cache(layer: OfLayer, x: Array) -> tuple[Array, Routed | None]:
                x, _, of_layer = run(layer, x, None)
                return x, of_layer

            x, routed = run_all(without_cache, layers, x)
        else:
            written, routed = list(cache), []
            for i, (layer, layer_cache) in enumerate(zip(layers, cache, strict=True)):
                x, written[i], of_layer = run(layer, x, layer_cache)
                routed.append(of_layer)
            cache = tuple(written)
        hidden = rms_norm(x, self.final_norm[...], self.config.norm_eps)
        return Output(hidden, cache, _stacked([x for x in routed if x is not None], tokens.shape))

    def _layers(self, recorded: Array | None) -> list[OfLayer]:
        """Parameters of each layer, and the experts recorded of it."""
        sparse = self.config.sparse_layers
        return [
            (
                nnx.state(layer),
                recorded[:, :, sparse.index(i)] if recorded is not None and i in sparse else None,
            )
            for i, layer in enumerate(self.layers)
        ]

    def _definitions(self) -> dict[bool, nnx.GraphDef]:
        """Of the layers with experts (True) and of those without."""
        first = {self.config.is_sparse(i): i for i in reversed(range(len(self.layers)))}
        return {is_sparse: nnx.graphdef(self.layers[i]) for is_sparse, i in first.items()}

    def _embed(self, tokens: Array, partition: Partition) -> Array:
        """A token that has no row is a vector of zeros: a draft model is shown what it does not know."""
        with jax.named_scope("embed"):
            table = self.embedding[...]
            local = tokens - partition.shard_index("vocab") * table.shape[0]
            is_local = (local >= 0) & (local < table.shape[0])
            rows = jnp.take(table, jnp.where(is_local, local, 0), axis=0)
            x = partition.sum(jnp.where(is_local[..., None], rows, 0), "vocab")
            return partition.constrain(x, "batch", None, None)

    @property
    def head(self) -> Array:
        """The weights of the logits, [vocab, embed]."""
        return (self.embedding if self.config.tie_embeddings else self.lm_head)[...]

    def logits(
        self, hidden: Float[Array, "*batch embed"], partition: Partition | None = None
    ) -> Float[Array, "*batch vocab"]:
        """Float32 logits over the padded vocabulary, whole on every device."""
        return logits(self.head, hidden, partition or Whole())


def logits(
    head: Float[Array, "vocab embed"], hidden: Float[Array, "*batch embed"], partition: Partition
) -> Float[Array, "*batch vocab"]:
    """Float32, over the padded vocabulary, whole on every device."""
    with jax.named_scope("lm_head"):
        return partition.gather(linear(hidden, head, dtype=jnp.float32), "vocab")


def _stacked(routed: list[Routed], shape: tuple[int, ...]) -> Routed:
    """
    Args:
      shape: of the tokens.
    """
    if not routed:
        none = jnp.zeros((*shape, 0, 0), ROUTE_DTYPE)
        return Routed(none, jnp.zeros((0, 0)), jnp.zeros((*shape, 0)))
    experts, probability, margin = zip(*routed, strict=True)
    experts = jnp.stack(experts, axis=2).astype(ROUTE_DTYPE)
    return Routed(experts, jnp.stack(probability), jnp.stack(margin, axis=2))


@partial(jax.jit, static_argnums=0, static_argnames=("partition", "remat"))
def _run_layer(
    definition: nnx.GraphDef[Layer],
    params: nnx.State,
    x: Array,
    positions: Array,
    rotation: Rotation,
    cache: Cache | None,
    is_real: Array,
    recorded: Array | None,
    *,
    partition: Partition,
    remat: str,
) -> tuple[Array, Cache | None, Routed | None]:
    """Layers of a kind differ in their numbers alone: a program traces and lowers the first one for
    all."""

    def run(
        params: nnx.State, x: Array, cache: Cache | None, recorded: Array | None
    ) -> tuple[Array, Cache | None, Routed | None]:
        layer = nnx.merge(definition, params)
        return layer(x, positions, rotation, cache, is_real, recorded, partition)

    return rematerialized(run, remat)(params, x, cache, recorded)
