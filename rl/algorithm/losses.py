"""The interface of losses. Knows predictions and weights, not models, tokens or batches.

Per-token arrays are [rows, length]. Position t describes its target, the token at t + 1. Every loss
is a plain sum over tokens times `weights`, which are computed once for a whole mini-batch
(`batches.py`). So the gradients of its micro-batches add up to exactly the mini-batch's gradient.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

T = TypeVar("T")
PerToken = Float[Array, "rows length"]
Responses = Int[Array, "rows length"]  # number of each token's response in its row, from 1; 0: none
Columns = Mapping[str, PerToken]
# Names of the predictions that a model makes at each token, by the kind of its head.
LOGPROBS = "logprobs"
ENTROPY = "entropy"
VALUES = "values"
TEACHER_KL = "teacher_kl"  # also of a vocabulary head, if the loss reads a teacher's tokens
PREDICTED = {"vocab": (LOGPROBS, ENTROPY), "scalar": (VALUES,)}
# Sums over tokens by name: of each metric, of the weights ("weight"), of routers (`balance.py`).
Sums = dict[str, Float[Array, "..."]]


class Reduction(Enum):
    """How a metric's values, one for each token, become one number per optimizer step."""

    SUM = "sum"  # Σ weights * values
    MEAN = "mean"  # Σ weights * values / Σ weights
    MAX = "max"  # the largest value among tokens in the loss, at least 0
    MIN = "min"  # the smallest value among tokens in the loss

    @property
    def of_none(self) -> float:
        """The result for no tokens, with which a sum over micro-batches starts."""
        return jnp.inf if self is Reduction.MIN else 0.0

    def of_tokens(self, values: PerToken, weights: PerToken) -> Float[Array, ""]:
        """Returns the result for a micro-batch; a MEAN is divided by the weights at the end."""
        is_counted = weights > 0
        match self:
            case Reduction.MAX:
                return jnp.max(values, where=is_counted, initial=self.of_none)
            case Reduction.MIN:
                return jnp.min(values, where=is_counted, initial=self.of_none)
            case _:
                return jnp.sum(weights * values)

    def join(self, one: Float[Array, ""], other: Float[Array, ""]) -> Float[Array, ""]:
        """Returns the result for two micro-batches together, given that for each."""
        joined = {Reduction.MAX: jnp.maximum, Reduction.MIN: jnp.minimum}.get(self, jnp.add)
        return joined(one, other)

    def of_steps(self, values: Sequence[float], weights: Sequence[float]) -> float:
        """Returns a MAX's or MIN's extreme, or else the mean, over optimizer steps with tokens in
        the loss; NaN if there is no such step. Runs on the host."""
        counted = [(x, w) for x, w in zip(values, weights, strict=True) if w > 0]
        if not counted:
            return math.nan
        if self is Reduction.MAX:
            return max(x for x, _ in counted)
        if self is Reduction.MIN:
            return min(x for x, _ in counted)
        return float(np.mean([x * (1 / w) if self is Reduction.MEAN else x for x, w in counted]))


class Loss(ABC):
    """A loss: the predictions and columns that it reads, and the metrics that it gives.

    Subclasses are frozen dataclasses; equal losses share compiled programs. The loss itself is the
    metric `loss`, a SUM.
    """

    @property
    @abstractmethod
    def metrics(self) -> Mapping[str, Reduction]:
        """Names of the metrics, `loss` included, and how each is reduced."""

    @property
    @abstractmethod
    def needs(self) -> tuple[str, ...]:
        """Names of the per-token columns that the loss reads."""

    @property
    def predicted(self) -> tuple[str, ...]:
        """Names of the model's predictions that the loss reads; all are of one kind of head
        (`PREDICTED`)."""
        return PREDICTED["vocab"]

    @property
    def teacher_top_k(self) -> int:
        """Number of a teacher's likeliest tokens that the loss reads per position (`TopTokens`)."""
        return 0

    @property
    def has_entropy_gradient(self) -> bool:
        """Whether the loss needs the gradient of the entropy."""
        return False

    @abstractmethod
    def values(self, predicted: Columns, columns: Columns, responses: Responses) -> Columns:
        """Returns the value of each metric at each token.

        All arguments are 0 where a weight is 0; only `predicted` has gradients."""

    def __call__(
        self,
        predicted: Columns,
        columns: Columns,
        weights: PerToken,
        responses: Responses | None = None,
    ) -> tuple[Float[Array, ""], Sums]:
        """Computes the loss of a micro-batch. Raises ValueError if a column that the loss needs is
        missing.

        Args:
          predicted: predictions of the model being updated. A vocabulary head gives `logprobs`, log
            π(token), and `entropy` of the next-token distribution, in nats. A scalar head gives
            `values`.
          columns: at least the columns in `needs`; none has a gradient.
          weights: weight of each token, 0 if it is not in the loss. All zeros give 0, not NaN.
            Where a weight is 0, values of the other arrays have no influence, not even NaN.
          responses: number in its row, from 1, of the response that each token belongs to; None if
            each row is one response.

        Returns:
          The loss, and the sums of its metrics (without gradient).
        """
        read = self.read(columns)
        is_counted = weights > 0
        # Selecting before exp, not after, keeps NaN and overflow of ignored tokens out of the gradient.
        predicted, read = jax.tree.map(
            lambda x: jnp.where(is_counted, x, 0.0),
            ({name: predicted[name] for name in self.predicted}, jax.lax.stop_gradient(read)),
        )
        # Tokens that are not in the loss are in no sum over a response either.
        responses = jnp.where(is_counted, 1 if responses is None else responses, 0)
        values = self.values(predicted, read, responses)
        sums = {name: how.of_tokens(values[name], weights) for name, how in self.metrics.items()}
        return sums["loss"], jax.lax.stop_gradient({**sums, "weight": jnp.sum(weights)})

    def read(self, columns: Mapping[str, T]) -> dict[str, T]:
        """Returns the columns that the loss needs. Raises ValueError if one of them is missing."""
        if missing := [name for name in self.needs if name not in columns]:
            raise ValueError(
                f"{type(self).__name__} needs the columns {', '.join(self.needs)}; "
                f"{', '.join(missing)} is missing."
            )
        return {name: columns[name] for name in self.needs}

    def zero_sums(self) -> Sums:
        """Returns the sums before any micro-batch."""
        each = {name: jnp.full((), how.of_none) for name, how in self.metrics.items()}
        return {**each, "weight": jnp.zeros(())}

    def add(self, sums: Sums, other: Sums) -> Sums:
        """Returns the sums of two micro-batches together."""
        joined = {name: how.join(sums[name], other[name]) for name, how in self.metrics.items()}
        return {**joined, "weight": sums["weight"] + other["weight"]}

    def summary(self, steps: Sequence[Mapping[str, Float[np.ndarray, ""]]]) -> dict[str, float]:
        """Returns metrics over optimizer steps from each step's sums, on the host; NaN without
        tokens."""
        weights = [float(sums["weight"]) for sums in steps]
        found = {
            name: how.of_steps([float(sums[name]) for sums in steps], weights)
            for name, how in self.metrics.items()
        }
        return self.reported(found)

    def reported(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Returns the metrics to report, given the `metrics` over all optimizer steps. They differ
        if a loss computes some from others, such as a variance from means."""
        return dict(metrics)
