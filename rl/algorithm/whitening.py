"""Scales numbers to variance 1 over all tokens of a batch. Runs on the host."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

_EPSILON = 1e-8


def whitened(
    values: Sequence[Float[np.ndarray, " _"]], *, shift_mean: bool = True
) -> list[Float[np.ndarray, " _"]]:
    """Returns values scaled to variance 1 over all tokens, with mean 0 or the mean that they had.
    They are float64 in the shapes of `values`.

        (x - μ) / sqrt(σ² + ε)          shift_mean = True (advantages)
        (x - μ) / sqrt(σ² + ε) + μ      shift_mean = False (rewards)

    σ² is the sample variance, with Bessel's correction n / (n - 1), as verl and TRL compute it. A
    single token has σ = 0.

    Args:
      values: one array for each response. NaN stays NaN, and counts in neither μ nor σ.

    Reference: Huang et al. 2024, https://arxiv.org/abs/2403.17031, details 15 and 19.
    """
    exact = [np.asarray(each, np.float64) for each in values]
    tokens = np.concatenate(exact) if exact else np.zeros(0)
    tokens = tokens[~np.isnan(tokens)]
    mean = tokens.mean() if len(tokens) else 0.0
    variance = np.square(tokens - mean).sum() / max(len(tokens) - 1, 1)
    shift = 0.0 if shift_mean else mean
    return [(each - mean) / np.sqrt(variance + _EPSILON) + shift for each in exact]
