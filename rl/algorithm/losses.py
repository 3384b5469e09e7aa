"""What a loss is. Knows log-probabilities and weights, not models, tokens or batches.

Per-token arrays are [rows, length]; position t belongs to the target, the token after position t.
Every loss is a plain sum over tokens times `weights`, which are computed once for a whole
mini-batch (`batches.py`): adding the gradients of its micro-batches gives exactly the mini-batch's
gradient.
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
Responses = Int[Array, "rows length"]  # the number of a token's response in its row; 0: none
Columns = Mapping[str, PerToken]
# Of each metric by name, of the weights, and of routers (`balance.py`).
Sums = dict[str, Float[Array, "..."]]


class Reduction(Enum):
    """How the values of a metric, one for each token, become one number of an optimizer step."""

    SUM = "sum"  # Σ weights * values
    MEAN = "mean"  # the same, divided by Σ weights
    MAX = "max"  # the largest of a token in the loss, at least 0
    MIN = "min"  # the smallest

    @property
    def of_none(self) -> float:
        """Where sums begin, before any token."""
        return jnp.inf if self is Reduction.MIN else 0.0

    def of_tokens(self, values: PerToken, weights: PerToken) -> Float[Array, ""]:
        """The statistic of a micro-batch; a MEAN is divided at the end."""
        is_counted = weights > 0
        match self:
            case Reduction.MAX:
                return jnp.max(values, where=is_counted, initial=self.of_none)
            case Reduction.MIN:
                return jnp.min(values, where=is_counted, initial=self.of_none)
            case _:
                return jnp.sum(weights * values)

    def join(self, one: Float[Array, ""], other: Float[Array, ""]) -> Float[Array, ""]:
        """The statistic of two micro-batches together."""
        joined = {Reduction.MAX: jnp.maximum, Reduction.MIN: jnp.minimum}.get(self, jnp.add)
        return joined(one, other)

    def of_steps(self, values: Sequence[float], weights: Sequence[float]) -> float:
        """The statistic over optimizer steps that have tokens in the loss, on the host: the
        extreme, or the mean over steps; NaN where there is none."""
        counted = [(x, w) for x, w in zip(values, weights, strict=True) if w > 0]
        if not counted:
            return math.nan
        if self is Reduction.MAX:
            return max(x for x, _ in counted)
        if self is Reduction.MIN:
            return min(x for x, _ in counted)
        return float(np.mean([x * (1 / w) if self is Reduction.MEAN else x for x, w in counted]))


class Loss(ABC):
    """A loss as a value: which columns it reads, and which metrics it gives.

    Its subclasses are frozen dataclasses: equal ones are the same program. The loss is the metric
    of that name, a SUM.
    """

    @property
    @abstractmethod
    def metrics(self) -> Mapping[str, Reduction]:
        """The names of its metrics, `loss` among them, and how each is reduced."""

    @property
    @abstractmethod
    def needs(self) -> tuple[str, ...]:
        """The names of the per-token columns that it reads."""

    @property
    def has_entropy_gradient(self) -> bool:
        """Whether the gradient of the entropy is worth computing."""
        return False

    @abstractmethod
    def values(
        self, logprobs: PerToken, entropy: PerToken, columns: Columns, responses: Responses
    ) -> Columns:
        """The value of each metric at each token. All arguments are 0 where a weight is 0, and
        only `logprobs` and `entropy` have gradients."""

    def __call__(
        self,
        logprobs: PerToken,
        entropy: PerToken,
        columns: Columns,
        weights: PerToken,
        responses: Responses | None = None,
    ) -> tuple[Float[Array, ""], Sums]:
        """The loss of a micro-batch.

        Args:
          logprobs: log π(token) in nats under the policy being updated.
          entropy: of that policy's next-token distribution in nats.
          columns: at least what the loss needs; none has a gradient.
          weights: of each token, 0 where it is not part of the loss. All zeros give 0, not NaN;
            what the other arrays hold where a weight is 0 has no influence, not even NaN.
          responses: which of its row's responses each token belongs to, from 1; None: each row is
            one response.

        Returns:
          The loss, and the sums of its metrics (without gradient).

        Raises:
          ValueError: a column that the loss needs is missing.
        """
        read = self.read(columns)
        is_counted = weights > 0
        # Selecting before exp, not after, keeps NaN and overflow of ignored tokens out of the gradient.
        logprobs, entropy, read = jax.tree.map(
            lambda x: jnp.where(is_counted, x, 0.0),
            (logprobs, entropy, jax.lax.stop_gradient(read)),
        )
        # What is not in the loss is in no sum over a response either.
        responses = jnp.where(is_counted, 1 if responses is None else responses, 0)
        values = self.values(logprobs, entropy, read, responses)
        sums = {name: how.of_tokens(values[name], weights) for name, how in self.metrics.items()}
        return sums["loss"], jax.lax.stop_gradient({**sums, "weight": jnp.sum(weights)})

    def read(self, columns: Mapping[str, T]) -> dict[str, T]:
        """Those of these columns that the loss needs.

        Raises:
          ValueError: one is missing.
        """
        if missing := [name for name in self.needs if name not in columns]:
            raise ValueError(
                f"{type(self).__name__} needs the columns {', '.join(self.needs)}; "
                f"{', '.join(missing)} is missing."
            )
        return {name: columns[name] for name in self.needs}

    def zero_sums(self) -> Sums:
        """The sums before any micro-batch."""
        each = {name: jnp.full((), how.of_none) for name, how in self.metrics.items()}
        return {**each, "weight": jnp.zeros(())}

    def add(self, sums: Sums, other: Sums) -> Sums:
        """The sums of both."""
        joined = {name: how.join(sums[name], other[name]) for name, how in self.metrics.items()}
        return {**joined, "weight": sums["weight"] + other["weight"]}

    def summary(self, steps: Sequence[Mapping[str, Float[np.ndarray, ""]]]) -> dict[str, float]:
        """The metrics of optimizer steps from the sums of each, on the host; NaN without tokens."""
        weights = [float(sums["weight"]) for sums in steps]
        return {
            name: how.of_steps([float(sums[name]) for sums in steps], weights)
            for name, how in self.metrics.items()
        }
