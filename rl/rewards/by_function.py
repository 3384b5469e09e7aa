"""Scores by reward function, group and sample, for algorithms that need more than their sum."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float

from pat_jax.rl.algorithm.advantages import has_signal
from pat_jax.rl.rewards.weighted_sum import FunctionScores


@dataclass(frozen=True)
class ScoresByFunction:
    """The scores of all reward functions for the responses of an iteration."""

    # NaN if the function does not apply to the response, or if the response has no reward.
    scores: Float[np.ndarray, "functions groups samples"]
    weights: tuple[float, ...]  # weights of the functions

    @classmethod
    def of(
        cls, functions: Sequence[FunctionScores], rewards: Float[np.ndarray, "groups samples"]
    ) -> "ScoresByFunction":
        """Returns the scores by function, group and sample; NaN for responses without a reward.

        Args:
          functions: scores of at least one function for the responses of `rewards`, by group.
        """
        scores = np.stack([one.array.reshape(rewards.shape) for one in functions])
        return cls(
            np.where(np.isnan(rewards), np.nan, scores), tuple(one.weight for one in functions)
        )

    @classmethod
    def joined(cls, parts: Sequence["ScoresByFunction"]) -> "ScoresByFunction":
        """Returns the groups of several batches, one after the other."""
        scores = np.concatenate([one.scores for one in parts], axis=1)
        return cls(scores, parts[0].weights)

    def of_groups(self, chosen: Bool[np.ndarray, " groups"] | slice) -> "ScoresByFunction":
        return replace(self, scores=self.scores[:, chosen])

    @property
    def has_signal(self) -> Bool[np.ndarray, " groups"]:
        """Whether, in each group, a function of a weight other than 0 gives different scores."""
        counted = [has_signal(x) for x, w in zip(self.scores, self.weights, strict=True) if w]
        return np.any(counted, axis=0)
