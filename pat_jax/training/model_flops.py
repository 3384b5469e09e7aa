"""Counts the floating-point operations that training a model needs, whatever a program executes."""

import numpy as np
from jaxtyping import Int

from pat_jax.models.config import ModelConfig


def training_flops(
    model: ModelConfig,
    lengths: Int[np.ndarray, " sequences"],
    shared: Int[np.ndarray, " sequences"] | int = 0,
    *,
    adapter_weights: int | None = None,
) -> float:
    """Returns the floating-point operations of a forward and backward pass over some sequences.

    A sequence has n tokens. The first s of them are shared with another sequence and counted there:

        6 · (weights of matrix products) · Σ (n - s)  +  6 · layers · heads · head_dim · Σ (n² - s²)

    If adapters are trained, a frozen weight has no gradient of its own:

        (4 · (weights of matrix products) + 6 · adapter_weights) · Σ (n - s)  +  …

    The second term is causal attention: a token sees on average half of the tokens. Embedding
    lookups, padding, recomputed layers and passes that only give log-probabilities do not count.

    Args:
      lengths: n of each sequence.
      shared: s of each sequence.
      adapter_weights: number of adapter weights that each token is multiplied with, or None if the
        whole model is trained.

    Reference: Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B, which counts
    attention as if each token saw all others.
    """
    tokens = lengths.astype(np.float64)
    known = np.asarray(shared, np.float64)
    attention = model.num_layers * model.num_heads * model.head_dim
    of_a_token = 6 * matrix_weights(model)
    if adapter_weights is not None:
        of_a_token = 4 * matrix_weights(model) + 6 * adapter_weights
    return of_a_token * np.sum(tokens - known) + 6 * attention * np.sum(tokens**2 - known**2)


def matrix_weights(model: ModelConfig) -> int:
    """Returns the number of weights that each token is multiplied with.

    Norms, biases, embedding lookups, and experts that a token does not use do not count."""
    heads = 2 * model.num_heads + 2 * model.num_kv_heads  # queries and output, keys and values
    units = 3 * model.mlp_dim
    num_sparse = len(model.sparse_layers)
    outputs = model.num_layers * heads * model.head_dim + (model.num_layers - num_sparse) * units
    of_experts = 0
    if (experts := model.experts) is not None:
        outputs += num_sparse * (experts.num_experts + 2 * experts.latent_dim)  # the router's first
        active = 3 * experts.num_experts_per_tok * experts.expert_dim
        of_experts = num_sparse * active * model.expert_embed_dim
    return model.embed_dim * (outputs + model.head_outputs) + of_experts
