"""The transformer, in Flax NNX. Parameters and activations carry axis names, but no mesh.

Weights are stored as [*out, *in], as in checkpoints: see `layers.linear`.
"""

from collections.abc import Callable
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Int16

from pat_jax.models.attention import Attention, Cache
from pat_jax.models.config import ModelConfig
from pat_jax.models.experts import ROUTE_DTYPE, Experts, Routed
from pat_jax.models.layer_loop import scanned, unrolled
from pat_jax.models.layers import (
    Rotation,
    angles,
    linear,
    rms_norm,
    rope_frequencies,
    swiglu,
)
from pat_jax.models.parameters import Keys, normal, ones, param, zeros
from pat_jax.models.partition import Partition
from pat_jax.models.rematerialization import NONE, rematerialized

OfLayer = tuple[nnx.State, Array | None, Any]  # a layer's parameters, recorded experts and cache
# A function (a layer, its input) -> (its output, (its cache, its router's choices)).
RunLayer = Callable[[OfLayer, Array], tuple[Array, tuple[Any, Routed | None]]]


class MLP(nnx.Module):
    """SwiGLU (arXiv 2002.05202): (silu(x·gate) ⊙ x·up) · down."""

    def __init__(self, config: ModelConfig, *, keys: Keys):
        embed = config.embed_dim
        mlp = config.mlp_dim
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
            normed = rms_norm(x, self.mlp_norm[...], self.eps)
            routed = None
            if isinstance(self.mlp, Experts):
                added, routed = self.mlp(normed, is_real, recorded, partition)
            else:
                added = self.mlp(normed, partition)
            return partition.constrain(x + added, "batch", None, None), cache, routed


class Output(NamedTuple):
    """The output of a transformer."""

    hidden: Float[Array, "rows length embed"]  # hidden states after the final norm
    cache: tuple[Any, ...] | None  # each layer's cache, with the tokens of this call written
    # The routers' choices, for the layers with experts in order. `experts` is int16[rows, length,
    # layers, k], `margin` float32[rows, length, layers]; sums have the layers as first dimension.
    routed: Routed


class Transformer(nnx.Module):
    """Decoder-only transformer of the Llama family; `config` chooses the architecture."""

    def __init__(self, config: ModelConfig, *, keys: Keys):
        vocab = config.padded_vocab_size
        embed = config.embed_dim
        self.embedding = param(keys, (vocab, embed), ("vocab", "embed"), normal(embed))
        self.layers = nnx.List([Layer(config, i, keys=keys) for i in range(config.num_layers)])
        self.final_norm = param(keys, (embed,), (None,), ones)
        if config.head == "scalar":
            self.score = param(keys, (1, embed), (None, "embed"), zeros)
            if config.head_bias:
                self.score_bias = param(keys, (1,), (None,), zeros)
        elif not config.tie_embeddings:
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
        """Runs the layers on tokens. Without a cache, a row may hold several packed sequences.

        Args:
          tokens: token ids; an id below 0 is padding, and no expert computes it.
          positions: each token's position in its sequence. Without a cache, 0 begins a sequence,
            and a token sees its own sequence up to itself. With a cache, it sees all tokens in its
            row up to its own position.
          recorded: the experts of each token in the layers that have experts, NOT_RECORDED where
            the routers choose, or None if the routers choose everywhere.
          remat: which values of each layer the backward pass keeps (`rematerialization.py`).
          scan_layers: whether layers run as a loop if there is no cache (`layer_loop.py`).
          depth: number of first layers to run, or None for all.
        """
        partition = partition or Partition()
        x = self._embed(tokens, partition).astype(dtype)
        how = {"is_real": tokens >= 0, "partition": partition, "remat": remat}
        run = self._runner(positions, **how)
        layers = self._layers(recorded, cache)[:depth]
        is_loop = scan_layers and cache is None
        x, beside = (scanned if is_loop else unrolled)(run, layers, x)
        caches, routed = zip(*beside, strict=True)
        hidden = rms_norm(x, self.final_norm[...], self.config.norm_eps)
        of_experts = [each for each in routed if each is not None]
        written = None if cache is None else caches
        return Output(hidden, written, _stacked(of_experts, tokens.shape))

    def _runner(self, positions: Array, **how: Any) -> RunLayer:
        """Returns a function that runs one layer, with or without experts, on its input."""
        how |= {
            "positions": positions,
            "rotation": angles(positions, rope_frequencies(self.config)),
        }
        first = {self.config.is_sparse(i): i for i in reversed(range(len(self.layers)))}
        definitions = {kind: nnx.graphdef(self.layers[i]) for kind, i in first.items()}

        def run(layer: OfLayer, x: Array) -> tuple[Array, tuple[Any, Routed | None]]:
            params, recorded, cache = layer
            definition = definitions["router" in params["mlp"]]
            x, cache, routed = _run_layer(
                definition, params, x, cache=cache, recorded=recorded, **how
            )
            return x, (cache, routed)

        return run

    def _layers(self, recorded: Array | None, caches: tuple[Any, ...] | None) -> list[OfLayer]:
        """Returns each layer, or only those that have one of `caches`."""
        sparse = self.config.sparse_layers
        each_cache = repeat(None) if caches is None else caches
        return [
            (
                nnx.state(layer),
                recorded[:, :, sparse.index(i)] if recorded is not None and i in sparse else None,
                cache,
            )
            for i, (layer, cache) in enumerate(zip(self.layers, each_cache, strict=False))
        ]

    def _embed(self, tokens: Array, partition: Partition) -> Array:
        """Returns embeddings; zeros for ids outside the vocabulary, which a draft model may get."""
        with jax.named_scope("embed"):
            table = self.embedding[...]
            local = tokens - partition.shard_index("vocab") * table.shape[0]
            is_local = (local >= 0) & (local < table.shape[0])
            rows = partition.look_up(table, jnp.where(is_local, local, 0))
            x = partition.sum(jnp.where(is_local[..., None], rows, 0), "vocab")
            return partition.constrain(x, "batch", None, None)

    @property
    def scalar_head(self) -> tuple[Array, Array | None]:
        """The weights [1, embed] of a scalar head, and its bias [1] or None."""
        return self.score[...], self.score_bias[...] if self.config.head_bias else None

    @property
    def head(self) -> Array:
        """The weights of the output head over the vocabulary, [vocab, embed]."""
        return (self.embedding if self.config.tie_embeddings else self.lm_head)[...]

    def logits(self, hidden: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """Returns float32 logits over the padded vocabulary, or over this device's shard of it."""
        with jax.named_scope("lm_head"):
            return linear(hidden, self.head, dtype=jnp.float32)


def values(
    head: tuple[Float[Array, "1 embed"], Float[Array, "1"] | None],
    hidden: Float[Array, "*batch embed"],
) -> Float[Array, "*batch"]:
    """Returns the float32 number that a scalar head predicts at each position."""
    weights, bias = head
    with jax.named_scope("score"):
        found = linear(hidden, weights, dtype=jnp.float32)[..., 0]
        return found if bias is None else found + bias[0].astype(jnp.float32)


def _stacked(routed: list[Routed], shape: tuple[int, ...]) -> Routed:
    """Returns the routing of all layers, stacked, for tokens of this `shape` [rows, length]."""
    if not routed:
        none = jnp.zeros((*shape, 0, 0), ROUTE_DTYPE)
        sums = jnp.zeros((0, 0))
        return Routed(none, sums, sums, jnp.zeros(0), jnp.zeros((*shape, 0)))
    experts, load, probability, entropy, margin = zip(*routed, strict=True)
    experts = jnp.stack(experts, axis=2).astype(ROUTE_DTYPE)
    load, probability, entropy = jnp.stack(load), jnp.stack(probability), jnp.stack(entropy)
    return Routed(experts, load, probability, entropy, jnp.stack(margin, axis=2))


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
    """Runs a layer. Layers of equal shapes share one trace and one lowering of this function."""

    def run(
        params: nnx.State, x: Array, cache: Cache | None, recorded: Array | None
    ) -> tuple[Array, Cache | None, Routed | None]:
        layer = nnx.merge(definition, params)
        return layer(x, positions, rotation, cache, is_real, recorded, partition)

    return rematerialized(run, remat)(params, x, cache, recorded)
