"""The loss of a critic: squared errors of values, clipped as PPO clips its policy.

Knows values and returns. Does not know how returns are computed (`critic_estimator.py`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from pat_jax.rl.algorithm.losses import PREDICTED, VALUES, Columns, Loss, Reduction, Responses

# Names of the means from which the explained variance is computed.
_MOMENTS = ("return_mean", "return_square", "error_mean", "error_square")
_ROUNDING = 1e-6  # a variance below this share of the mean square is a rounding error of float32


@dataclass(frozen=True)
class ValueLoss(Loss):
    """Half the squared error of the values, or of the clipped values where it is larger.

        loss = Σ weights * 0.5 * max((V - R)², (clip(V, V_old - ε, V_old + ε) - R)²)

    The maximum stops the gradient only of a value that has moved more than ε towards its return. ε
    is in units of the reward; 0 means no clip, thus plain squared errors.

    The explained variance is 1 - Var(R - V_old) / Var(R): 1 for a critic that knows the returns, 0
    for a constant, negative for one that is worse than a constant. It describes the critic before
    this batch's first update, whose values are in the advantages. It is NaN if all returns are
    equal up to rounding.

    Columns:
      returns: R, from `critic_estimator.gae`.
      old_values: V_old, the values before this batch's first update.

    Reference: Schulman et al. 2016, as in https://github.com/openai/baselines (ppo2);
    Huang et al. 2024, https://arxiv.org/abs/2403.17031, detail 16.
    """

    epsilon: float = 0.2  # ε

    @property
    def metrics(self) -> Mapping[str, Reduction]:
        return {
            "loss": Reduction.SUM,
            "clip_fraction": Reduction.MEAN,  # share of tokens whose gradient the clip stops
            "value_mean": Reduction.MEAN,  # mean value of the critic being updated
            **dict.fromkeys(_MOMENTS, Reduction.MEAN),
        }

    @property
    def needs(self) -> tuple[str, ...]:
        return ("returns", "old_values")

    @property
    def predicted(self) -> tuple[str, ...]:
        return PREDICTED["scalar"]

    def values(self, predicted: Columns, columns: Columns, responses: Responses) -> Columns:
        del responses
        value = predicted[VALUES]
        gained = columns["returns"]
        old = columns["old_values"]
        square = jnp.square(value - gained)
        largest = square
        is_clipped = jnp.zeros_like(square)
        if self.epsilon:
            clipped = jnp.square(jnp.clip(value, old - self.epsilon, old + self.epsilon) - gained)
            largest = jnp.maximum(square, clipped)
            is_clipped = (clipped > square).astype(square.dtype)
        error = gained - old
        return {
            "loss": 0.5 * largest,
            "clip_fraction": is_clipped,
            "value_mean": value,
            "return_mean": gained,
            "return_square": jnp.square(gained),
            "error_mean": error,
            "error_square": jnp.square(error),
        }

    def reported(self, metrics: Mapping[str, float]) -> dict[str, float]:
        mean, square, error, error_square = (metrics[name] for name in _MOMENTS)
        variance = square - mean**2
        unexplained = error_square - error**2
        has_variance = variance > _ROUNDING * square
        explained = 1 - unexplained / variance if has_variance else math.nan
        kept = {name: x for name, x in metrics.items() if name not in _MOMENTS[1:]}
        return kept | {"explained_variance": explained}
