"""Advantages from several rewards that are normalised one by one. Runs on the host."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from pat_jax.rl.algorithm.advantages import group_advantages
from pat_jax.rl.algorithm.whitening import whitened


def gdpo_advantages(
    scores: Float[np.ndarray, "functions groups samples"], weights: Sequence[float]
) -> Float[np.ndarray, "groups samples"]:
    """Returns each response's advantage over its siblings, after each function's scores are
    normalised separately. Advantages are float32, NaN for a response without any score.

        A_k = (r_k - mean of the group) / (σ_k of the group + 1e-6)     for each function k
        S   = Σ_k w_k A_k
        A   = (S - mean of the batch) / sqrt(σ² of the batch + 1e-8)

    Normalising the sum instead (GRPO) lets rewards of a large spread dominate whatever the weights,
    and makes different combinations of rewards equal. σ is the sample's (n - 1). A function that
    gives all responses of a group the same score adds exactly 0 in this group.

    Args:
      scores: scores by each reward function; NaN if the function does not apply to the response,
        which then counts in none of the function's means.
      weights: w, one for each function. A function of weight 0 is left out.

    Reference: Liu et al. 2026, https://arxiv.org/abs/2601.05242, section 3 (GDPO).
    """
    counted = [k for k, weight in enumerate(weights) if weight]
    relative = [group_advantages(scores[k]).astype(np.float64) for k in counted]
    total = sum(weights[k] * np.nan_to_num(each) for k, each in zip(counted, relative, strict=True))
    is_scored = np.any([~np.isnan(each) for each in relative], axis=0)
    (found,) = whitened([np.where(is_scored, total, np.nan).reshape(-1)])
    return found.reshape(is_scored.shape).astype(np.float32)
