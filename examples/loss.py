"""A loss of your own: REINFORCE++'s baseline with a soft limit instead of a clip.

    python -m pat_jax.train --preset demo --algorithm.loss examples/loss.py:SoftLimit

The rows of a batch are arrays of one number per token; `values` returns one per token for each
metric, and pat_jax weights and sums them. From Python: pat_jax.train("demo", loss=SoftLimit(0.5)).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from pat_jax.config.learning import AlgorithmConfig
from pat_jax.rl.algorithm.losses import Columns, Loss, Reduction, Responses


@dataclass(frozen=True)  # equal losses share compiled programs
class SoftLimit(Loss):
    """-advantage * ratio + strength / 2 * (log ratio)², with the ratio to the policy before."""

    strength: float = 1.0

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> "SoftLimit":
        """Makes the loss from options; without it, fields have their defaults."""
        return cls(strength=0.2 / algorithm.epsilon)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("advantages", "old_logprobs")

    @property
    def metrics(self) -> Mapping[str, Reduction]:
        return {"loss": Reduction.SUM, "entropy": Reduction.MEAN, "log_ratio_max": Reduction.MAX}

    def values(self, predicted: Columns, columns: Columns, responses: Responses) -> Columns:
        log_ratio = predicted["logprobs"] - columns["old_logprobs"]
        gain = columns["advantages"] * jnp.exp(jnp.clip(log_ratio, -20, 20))
        return {
            "loss": 0.5 * self.strength * log_ratio**2 - gain,
            "entropy": predicted["entropy"],
            "log_ratio_max": jnp.abs(log_ratio),
        }
