"""A mixture of experts: a router chooses a few of a layer's experts for each token.

The rollout records which experts computed each token. A caller that computes the token again may
pass the recorded experts. The current router then only weights their outputs (R3, arXiv
2510.11370).

With `latent_dim` the experts' inputs and outputs are narrower than the layer, so devices exchange
less (BigMac, arXiv 2502.16927, equation 2). Two matrices shared by all experts project down to
`latent_dim` and back up. The router sees the full width.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from pat_jax.models.config import ModelConfig
from pat_jax.models.kernels.expert_mlp import mlp_by_expert
from pat_jax.models.kernels.grouped import tile_size
from pat_jax.models.kernels.kernel_choice import ANYWHERE, Kernels
from pat_jax.models.layers import linear
from pat_jax.models.parameters import Keys, normal, orthonormal, param
from pat_jax.models.partition import Partition, Rows
from pat_jax.models.rematerialization import ROUTER

ROUTE_DTYPE = jnp.int16
NOT_RECORDED = -1  # in place of a recorded expert: then the router chooses
NO_TOKEN = NO_EXPERT = -1  # padding in place of a token id, and in place of the token's experts


class Routed(NamedTuple):
    """The choices of a layer's router for some tokens, and statistics of them."""

    experts: Int[Array, "rows length k"]  # the router's own choice, likeliest first
    # Float32 sums over the real tokens: how many of them each expert is chosen for, each expert's
    # probability, and the entropy of the router's distribution in nats.
    load: Float[Array, " num_experts"]
    probability: Float[Array, " num_experts"]
    entropy: Float[Array, ""]
    # Smallest logit of the experts that computed a token, minus the largest logit of the others. It
    # is below 0 where the recorded experts are not the likeliest.
    margin: Float[Array, "rows length"]


class Experts(nnx.Module):
    """Σ pᵢ(x) · Eᵢ(x) over the k likeliest experts; pᵢ is the router's weight and Eᵢ a SwiGLU MLP
    (arXiv 1701.06538). With `latent_dim`: (Σ pᵢ(x) · Eᵢ(x · descend)) · ascend."""

    def __init__(self, config: ModelConfig, *, keys: Keys):
        assert config.experts is not None
        self.config = config.experts
        embed = config.embed_dim
        dim = self.config.expert_dim
        num = self.config.num_experts
        width = config.expert_embed_dim
        latent = self.config.latent_dim
        axes = ("expert", "expert_dim", None)
        down_axes = ("expert", None, "expert_dim")
        self.router = param(keys, (num, embed), (None, "embed"), normal(embed))
        of_down = normal(dim, 2 * config.num_layers)
        self.gate = param(keys, (num, dim, width), axes, normal(embed), contracted=1)
        self.up = param(keys, (num, dim, width), axes, normal(embed), contracted=1)
        self.down = param(keys, (num, width, dim), down_axes, of_down, contracted=1)
        if latent:
            # Rows so long that Σ pᵢ Eᵢ starts at the scale it has without `latent_dim`: smaller
            # weights would change much in Adam's steps. Models learn faster from orthogonal rows.
            shared = orthonormal(math.sqrt(embed / latent))
            self.descend = param(keys, (latent, embed), (None, "embed"), shared, contracted=1)
            self.ascend = param(keys, (embed, latent), ("embed", None), shared, contracted=1)

    def __call__(
        self,
        x: Float[Array, "rows length embed"],
        is_real: Bool[Array, "rows length"],
        recorded: Int[Array, "rows length k"] | None,
        partition: Partition,
    ) -> tuple[Float[Array, "rows length embed"], Routed]:
        """
        Args:
          is_real: whether each token is real; padding has no expert and the output 0.
          recorded: the experts that compute each token; NOT_RECORDED where the router chooses.
        """
        logits = linear(x, self.router.get_value(), dtype=jnp.float32)
        # Among equal logits the lower index wins, on every back end.
        likeliest = checkpoint_name(
            jax.lax.top_k(logits, self.config.num_experts_per_tok)[1], ROUTER
        )
        chosen = likeliest if recorded is None else jnp.where(recorded < 0, likeliest, recorded)
        experts = self.gate.get_value(), self.up.get_value(), self.down.get_value()
        if self.config.latent_dim:
            x = linear(x, self.descend.get_value())
        y = partition.by_expert(
            partial(_compute, num_experts=self.config.num_experts, kernels=partition.kernels),
            Rows(
                x, jnp.where(is_real[..., None], chosen, NO_EXPERT), self._weights(logits, chosen)
            ),
            experts,
        )
        if self.config.latent_dim:
            y = linear(y, self.ascend.get_value())
        load, probability, entropy = _summed(logits, likeliest, is_real)
        return y, Routed(likeliest, load, probability, entropy, _margin(logits, chosen))

    def _weights(self, logits: Array, chosen: Array) -> Float[Array, "rows length k"]:
        of_chosen = jnp.take_along_axis(logits, chosen, axis=-1)
        if self.config.norm_topk_prob:
            return jax.nn.softmax(of_chosen, axis=-1)
        return jnp.exp(of_chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True))


def _summed(logits: Array, likeliest: Array, is_real: Array) -> tuple[Array, Array, Array]:
    """Returns load, probability and entropy, as in `Routed`."""
    probabilities, logprobs = jax.nn.softmax(logits), jax.nn.log_softmax(logits)
    is_likeliest = jax.nn.one_hot(likeliest, logits.shape[-1], dtype=bool).any(axis=-2)
    each = is_likeliest.astype(jnp.float32), probabilities, -probabilities * logprobs
    real = (jnp.where(is_real[..., None], x, 0) for x in each)
    load, probability, entropy = (jnp.sum(x, axis=(0, 1)) for x in real)
    return load, probability, jnp.sum(entropy)


def _margin(logits: Array, chosen: Array) -> Float[Array, "rows length"]:
    is_chosen = jax.nn.one_hot(chosen, logits.shape[-1], dtype=bool).any(axis=-2)
    least = jnp.min(jnp.where(is_chosen, logits, jnp.inf), axis=-1)
    return least - jnp.max(jnp.where(is_chosen, -jnp.inf, logits), axis=-1)


def _compute(
    rows: Rows,
    experts: Any,
    first: Array | int,
    *,
    num_experts: int,
    kernels: Kernels = ANYWHERE,
) -> Float[Array, "rows length embed"]:
    """Returns each token's sum of the weighted outputs of this device's experts, which have the
    numbers from `first` on."""
    x, chosen, weights = rows
    k = chosen.shape[-1]
    num_rows = x.shape[0] * x.shape[1]
    size = tile_size(num_rows, k, num_experts)
    flat, chosen, weights = (each.reshape(num_rows, -1) for each in (x, chosen - first, weights))
    added = mlp_by_expert(experts, flat, chosen, weights, size=size, kernels=kernels)
    return added.reshape(*x.shape[:2], -1)
