"""The reward of a response: the weighted sum of several functions' scores.

Some algorithms need the scores of each function instead of their sum.

Pure functions of plain values. Imports no jax.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float

from pat_jax.rl.algorithm.advantages import has_signal
from pat_jax.rl.rewards.outcome import LARGEST, Cause, Failure

Score = tuple[float | Failure, Mapping[str, float]]  # the score, and the function's other numbers


@dataclass(frozen=True)
class FunctionScores:
    """One function's scores of all responses, in order."""

    spec: str  # the function as the option --reward names it
    name: str  # the function's name in metrics
    weight: float
    scores: Sequence[float | Failure]
    numbers: Sequence[Mapping[str, float]]  # further numbers for each response

    @property
    def pairs(self) -> Iterable[Score]:
        """The score and the further numbers of each response."""
        return zip(self.scores, self.numbers, strict=True)

    @property
    def array(self) -> Float[np.ndarray, " responses"]:
        """The scores; NaN where the function failed."""
        numbers = [np.nan if isinstance(x, Failure) else x for x in self.scores]
        return np.array(numbers, np.float32)

    @property
    def failures(self) -> list[Failure]:
        return [score for score in self.scores if isinstance(score, Failure)]

    @property
    def failed(self) -> list[int]:
        """Indices of the responses at which the function failed."""
        return [row for row, score in enumerate(self.scores) if isinstance(score, Failure)]


def in_order(
    spec: str, name: str, weight: float, by_response: Mapping[int, Score]
) -> FunctionScores:
    """Returns the scores of one reward function, in the order of the responses. `by_response` has
    the score of each response and its further numbers, by the response's index."""
    pairs = [by_response[row] for row in range(len(by_response))]
    scores, numbers = zip(*pairs, strict=True) if pairs else ((), ())
    return FunctionScores(spec, name, weight, list(scores), list(numbers))


def joined(parts: Sequence[FunctionScores]) -> FunctionScores:
    """Joins one function's scores of several batches of responses."""
    scores = [score for part in parts for score in part.scores]
    numbers = [each for part in parts for each in part.numbers]
    return replace(parts[0], scores=scores, numbers=numbers)


def weighted_sum(
    functions: Sequence[FunctionScores],
) -> tuple[Float[np.ndarray, " responses"], dict[int, Failure]]:
    """Returns Σ weightᵢ · scoreᵢ over the functions that apply to each response, or NaN if there is
    no such sum. Also returns the reasons for NaN, by response index.

    A function that returned None does not apply. A function of weight 0 is only measured: neither
    its score nor its failure has an effect. If another function fails, or none applies, the
    response has no reward.

    Args:
      functions: scores of at least one function, all for the same responses.
    """
    counted = [one for one in functions if one.weight]
    weights = [one.weight for one in counted]
    totals = [_total(weights, row) for row in zip(*(one.scores for one in counted), strict=True)]
    failures = {row: total for row, total in enumerate(totals) if isinstance(total, Failure)}
    numbers = [np.nan if isinstance(total, Failure) else total for total in totals]
    return np.array(numbers, np.float32), failures


def _total(weights: Sequence[float], scores: Sequence[float | Failure]) -> float | Failure:
    failures = [score for score in scores if isinstance(score, Failure)]
    broken = [failure for failure in failures if failure.cause is not Cause.NONE]
    if broken or len(failures) == len(scores):
        return (broken or failures)[0]
    parts = zip(weights, scores, strict=True)
    total = math.fsum(weight * x for weight, x in parts if not isinstance(x, Failure))
    if abs(total) <= LARGEST:
        return total
    return Failure(
        Cause.NOT_A_NUMBER, f"comes to {total:g} with its weight, more than float32 holds"
    )


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
