"""Rewards of one prompt with the largest variance that keeps their mean and order.

Runs on the host. Knows rewards, not tokens.
"""

import numpy as np
from jaxtyping import Float


def with_more_variance(
    rewards: Float[np.ndarray, "groups samples"],
    bounds: tuple[float, float] | None = None,
    probabilities: Float[np.ndarray, "groups samples"] | None = None,
) -> Float[np.ndarray, "groups samples"]:
    """Returns rewards z of each group that solve

        max Σ p z²    with    Σ p z = Σ p r,   m ≤ z ≤ M,   z in the order of r

    The rewards are sorted downwards. As many of the first ones as the mean allows get M, the next
    one gets what is left, and the others get m. With μ = (Σ p r - m) / (M - m),
    P_k = p_1 + … + p_k and the largest k that has P_k ≤ μ:

        z_1 … z_k = M,    z_{k+1} = m + (M - m) (μ - P_k) / p_{k+1},    z_{k+2} … = m

    Equal rewards share the mean of theirs. So rewards of two values, the bounds, stay as they are.

    Args:
      rewards: one row for each prompt. NaN: the response has no reward, and counts nowhere.
      bounds: m and M, the lowest and highest possible reward; None: the group's lowest and highest.
      probabilities: p of each response, positive, up to a factor. None: all the same, since sampled
        responses are drawn by their probability already.

    Returns:
      float64 in the shape of `rewards`.

    Raises:
      ValueError: a reward is outside of the bounds.

    Reference: Yang et al. 2025, https://arxiv.org/abs/2505.23247.
    """
    rewards = np.asarray(rewards, np.float64)
    weights = np.ones(rewards.shape) if probabilities is None else probabilities
    adjusted = rewards.copy()
    for group, (row, weight) in enumerate(zip(rewards, weights, strict=True)):
        is_scored = ~np.isnan(row)
        if not is_scored.any():
            continue
        known = row[is_scored]
        low, high = (known.min(), known.max()) if bounds is None else bounds
        if known.min() < low or known.max() > high:
            worst = known.min() if known.min() < low else known.max()
            raise ValueError(
                f"a reward of group {group} is {worst:g}; expected a number from {low:g} to "
                f"{high:g}, the bounds."
            )
        adjusted[group, is_scored] = _of_group(known, weight[is_scored], low, high)
    return adjusted


def _of_group(rewards: np.ndarray, weights: np.ndarray, low: float, high: float) -> np.ndarray:
    if low == high:
        return rewards
    # One number for each value of the rewards, so that ties share what they get.
    values, which = np.unique(-rewards, return_inverse=True)
    weights = np.asarray(weights, np.float64)
    shares = np.bincount(which, weights, len(values)) / weights.sum()
    room = (-shares @ values - low) / (high - low)  # μ
    before = np.cumsum(shares) - shares
    return (low + (high - low) * np.clip((room - before) / shares, 0.0, 1.0))[which]
