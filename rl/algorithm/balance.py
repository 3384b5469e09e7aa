"""A loss and metrics of how evenly a mixture's routers distribute tokens over experts.

Knows sums over the real tokens of a batch, prompts included. Does not know routers.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

# Names of sums over the real tokens of a micro-batch.
TOKENS = "routed_tokens"  # number of tokens, float32[]
LOAD = "router_load"  # tokens that an expert is chosen for, float32[layers, experts]
PROBABILITY = "router_probability"  # sum of an expert's probabilities, float32[layers, experts]
ENTROPY = "router_entropy_sum"  # sum of the routers' entropies in nats, float32[layers]


def zero_sums(layers: int, experts: int) -> dict[str, Array]:
    """Returns the sums before any micro-batch."""
    each = jnp.zeros((layers, experts))
    return {TOKENS: jnp.zeros(()), LOAD: each, PROBABILITY: each, ENTROPY: jnp.zeros(layers)}


def switch_loss(sums: Mapping[str, Any]) -> Any:
    """Returns the load-balancing loss, from k (experts per token) for even loads to num_experts.

        f_e = LOAD_e / TOKENS,  P_e = PROBABILITY_e / TOKENS
        loss = mean over layers of num_experts * Σ_e f_e * P_e

    Only P has a gradient. The loss is computed for each layer, so that two layers cannot compensate
    each other. Without tokens it is 0.

    Args:
      sums: arrays of NumPy or JAX by the names above (`LOAD` …).

    Reference: Fedus et al. 2021, https://arxiv.org/abs/2101.03961, eq. 4 to 6, for k experts per
    token. For one layer it equals transformers' `load_balancing_loss_func` with a mask.
    """
    load, probability, tokens = sums[LOAD], sums[PROBABILITY], sums[TOKENS]
    products = (load * probability).sum(-1) / (tokens + (tokens == 0)) ** 2
    return load.shape[-1] * products.mean()


def summary(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns router metrics over all tokens of some optimizer steps, given each step's sums; NaN
    without tokens. Runs on the host."""
    names = TOKENS, LOAD, PROBABILITY, ENTROPY
    sums = {name: np.sum([step[name] for step in steps], axis=0, dtype=float) for name in names}
    load = sums[LOAD]
    tokens = float(sums[TOKENS])
    found = {
        "router_aux_loss": switch_loss(sums),
        # A mean over layers: a step waits for the busiest device in each layer in turn.
        "expert_load_max": np.mean(load.max(axis=-1) / (load.mean(axis=-1) + (tokens == 0))),
        "dead_experts": np.mean(load == 0),
        "router_entropy": np.mean(sums[ENTROPY]) / max(tokens, 1),
    }
    return {name: float(value) if tokens else math.nan for name, value in found.items()}
