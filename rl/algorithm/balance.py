"""How evenly the routers of a mixture of experts share the tokens out: a loss, and metrics.

Knows sums over the real tokens of a batch, prompts included. Does not know routers.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

# By name, what a micro-batch's real tokens add up to.
TOKENS = "routed_tokens"  # their number, float32[]
LOAD = "router_load"  # those that have an expert among their likeliest, float32[layers, experts]
PROBABILITY = "router_probability"  # of each expert, float32[layers, experts]
ENTROPY = "router_entropy_sum"  # of a router's distribution over experts, nats, float32[layers]


def zero_sums(layers: int, experts: int) -> dict[str, Array]:
    """The sums before any micro-batch."""
    each = jnp.zeros((layers, experts))
    return {TOKENS: jnp.zeros(()), LOAD: each, PROBABILITY: each, ENTROPY: jnp.zeros(layers)}


def switch_loss(sums: Mapping[str, Any]) -> Any:
    """How unevenly tokens are shared out: k for even shares, num_experts at worst.

        f_e = LOAD_e / TOKENS,  P_e = PROBABILITY_e / TOKENS
        loss = mean over layers of num_experts * Σ_e f_e * P_e

    Only P has a gradient. Each layer counts by itself, so that two layers cannot make up for each
    other. Without tokens the loss is 0.

    Args:
      sums: as above, arrays of NumPy or JAX.

    Reference: Fedus et al. 2021, https://arxiv.org/abs/2101.03961, eq. 4 to 6, for k experts of a
    token; of one layer it is transformers' `load_balancing_loss_func` with a mask.
    """
    load, probability, tokens = sums[LOAD], sums[PROBABILITY], sums[TOKENS]
    products = (load * probability).sum(-1) / (tokens + (tokens == 0)) ** 2
    return load.shape[-1] * products.mean()


def summary(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Metrics of the tokens of some optimizer steps together, on the host; NaN without tokens."""
    names = TOKENS, LOAD, PROBABILITY, ENTROPY
    sums = {name: np.sum([step[name] for step in steps], axis=0, dtype=float) for name in names}
    load, tokens = sums[LOAD], float(sums[TOKENS])
    found = {
        "router_aux_loss": switch_loss(sums),
        # Of each layer: a step waits for the busiest device of every layer, one after the other.
        "expert_load_max": np.mean(load.max(axis=-1) / (load.mean(axis=-1) + (tokens == 0))),
        "dead_experts": np.mean(load == 0),
        "router_entropy": np.mean(sums[ENTROPY]) / max(tokens, 1),
    }
    return {name: float(value) if tokens else math.nan for name, value in found.items()}
