"""What the update minimises. Knows log-probabilities and weights, not models, tokens or batches.

Per-token arrays are [rows, length]; position t belongs to the target, the token after position t.
Every loss is a plain sum over tokens times `weights`, which are computed once for a whole mini-batch
(`batches.py`): adding the gradients of its micro-batches gives exactly the mini-batch's gradient.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

T = TypeVar("T")
PerToken = Float[Array, "rows length"]
Columns = Mapping[str, PerToken]
Sums = dict[str, Float[Array, ""]]  # of each metric by name, and of the weights

MAX_LOG_RATIO = (
    20.0  # exp of it is 4.9e8: far beyond any ratio that means something, far from infinity
)


class Reduction(Enum):
    """How the values of a metric, one for each token, become one number of an optimizer step."""

    SUM = "sum"  # Σ weights * values
    MEAN = "mean"  # the same, divided by Σ weights
    MAX = "max"  # the largest of a token in the loss, at least 0


class Loss(ABC):
    """A loss as a value: which columns it reads, and which metrics it gives.

    Its subclasses are frozen dataclasses: equal ones are the same program. The loss is the metric
    of that name, a SUM.
    """

    metrics: ClassVar[Mapping[str, Reduction]]

    @property
    @abstractmethod
    def needs(self) -> tuple[str, ...]:
        """The names of the per-token columns that it reads."""

    @abstractmethod
    def values(self, logprobs: PerToken, entropy: PerToken, columns: Columns) -> Columns:
        """The value of each metric at each token. All arguments are 0 where a weight is 0, and
        only `logprobs` has a gradient."""

    def __call__(
        self, logprobs: PerToken, entropy: PerToken, columns: Columns, weights: PerToken
    ) -> tuple[Float[Array, ""], Sums]:
        """The loss of a micro-batch.

        Args:
          logprobs: log π(token) in nats under the policy being updated.
          entropy: of that policy's next-token distribution in nats.
          columns: at least what the loss needs; none has a gradient.
          weights: of each token, 0 where it is no part of the loss. All zeros give 0, not NaN; what
            the other arrays hold where a weight is 0 has no influence, not even NaN.

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
            (logprobs, *jax.lax.stop_gradient((entropy, read))),
        )
        values = self.values(logprobs, entropy, read)
        sums = {
            name: jnp.max(jnp.where(is_counted, values[name], 0.0))
            if how is Reduction.MAX
            else jnp.sum(weights * values[name])
            for name, how in self.metrics.items()
        }
        return sums["loss"], jax.lax.stop_gradient({**sums, "weight": jnp.sum(weights)})

    def read(self, columns: Mapping[str, T]) -> dict[str, T]:
        """Of these columns those that the loss needs.

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
        """Of no micro-batch."""
        return {name: jnp.zeros(()) for name in (*self.metrics, "weight")}

    def add(self, sums: Sums, other: Sums) -> Sums:
        """The sums of both."""
        return {
            name: jnp.maximum(value, other[name])
            if self.metrics.get(name) is Reduction.MAX
            else value + other[name]
            for name, value in sums.items()
        }

    def summary(self, steps: Sequence[Mapping[str, Float[np.ndarray, ""]]]) -> dict[str, float]:
        """The metrics of optimizer steps from the sums of each, on the host: their mean over the
        steps, or the largest where they are a MAX."""
        found = {}
        for name, how in self.metrics.items():
            each = [float(sums[name]) for sums in steps]
            if how is Reduction.MEAN:
                weights = [float(sums["weight"]) for sums in steps]
                each = [x * (1 / w if w > 0 else 0.0) for x, w in zip(each, weights, strict=True)]
            found[name] = max(each) if how is Reduction.MAX else float(np.mean(each))
        return found


@dataclass(frozen=True)
class GRPOLoss(Loss):
    """The clipped surrogate of GRPO with its penalty towards the reference policy.

        ratio = exp(clamp(logprobs - old_logprobs, ±20))
        clipped = clip(ratio, 1 - ε, 1 + ε_high)
        gain = min(ratio * A, clipped * A)   where A ≥ 0
        gain = max(min(ratio * A, clipped * A), c * A)   where A < 0
        loss = -Σ weights * (gain - β * kl),   kl = k3(policy || reference)

    With weights 1 / (all tokens) this averages over tokens (DAPO); with
    1 / (tokens of its sequence * sequences), over each sequence first (GRPO); with
    1 / (longest response * sequences), by a constant (Dr. GRPO): see `batches.token_weights`.

    The clamp keeps loss and gradient finite: exp of an unbounded log-ratio overflows, and its
    gradient is NaN even where the clip cuts it. A token beyond the clamp has no gradient.

    Columns, log-probabilities in nats:
      advantages: A.
      behavior_logprobs: under the rollout's policy, before top-k and top-p; for metrics only.
      old_logprobs: under the policy before this batch's first update; not where `is_on_policy`.
      reference_logprobs: under the frozen reference policy; only where β > 0.

    Reference: Shao et al. 2024, https://arxiv.org/abs/2402.03300, eq. 3 and 4;
    Yu et al. 2025, https://arxiv.org/abs/2503.14476, eq. 8 (clip-higher, token average);
    Ye et al. 2020, https://arxiv.org/abs/1912.09729, eq. 5 (dual clip).
    """

    epsilon: float = 0.2  # ε, the lower clip
    epsilon_high: float = 0.2  # ε_high, the upper clip (above ε: clip-higher)
    # c, the most that a ratio counts for where A < 0: without it nothing bounds the gradient of a
    # token that has become likelier but should not. 0 leaves it out, as the paper.
    dual_clip: float = 3.0
    beta: float = 0.0  # β
    # Every batch is used for one update, so the old policy is the policy itself: the ratio is 1, and
    # no clip acts.
    is_on_policy: bool = False

    metrics: ClassVar[Mapping[str, Reduction]] = {
        "loss": Reduction.SUM,
        "clip_fraction": Reduction.MEAN,  # tokens whose policy gradient the clip has cut to zero
        "approx_kl": Reduction.MEAN,  # KL(old || policy) in nats, k3 estimate
        "reference_kl": Reduction.MEAN,  # KL(policy || reference) in nats, k3 estimate
        "entropy": Reduction.MEAN,  # of the policy's next-token distribution, nats
        "cross_entropy": Reduction.MEAN,  # -log π(token), nats
        "behavior_gap": Reduction.MEAN,  # |old - behavior| of the log-probabilities, nats
        "behavior_gap_max": Reduction.MAX,
    }

    @property
    def needs(self) -> tuple[str, ...]:
        old = () if self.is_on_policy else ("old_logprobs",)
        reference = ("reference_logprobs",) if self.beta else ()
        return ("advantages", "behavior_logprobs", *old, *reference)

    def values(self, logprobs: PerToken, entropy: PerToken, columns: Columns) -> Columns:
        old = jax.lax.stop_gradient(logprobs) if self.is_on_policy else columns["old_logprobs"]
        advantage = columns["advantages"]
        ratio = jnp.exp(_log_ratio(logprobs, old))
        clipped = jnp.clip(ratio, 1.0 - self.epsilon, 1.0 + self.epsilon_high)
        gain = jnp.minimum(ratio * advantage, clipped * advantage)
        if self.dual_clip:
            gain = jnp.where(advantage < 0, jnp.maximum(gain, self.dual_clip * advantage), gain)
        reference_kl = (
            k3_kl(logprobs, columns["reference_logprobs"])
            if self.beta
            else jnp.zeros_like(logprobs)
        )
        gap = jnp.abs(old - columns["behavior_logprobs"])
        return {
            "loss": self.beta * reference_kl - gain,
            "clip_fraction": (gain != ratio * advantage).astype(ratio.dtype),
            "approx_kl": k3_kl(old, logprobs),
            "reference_kl": reference_kl,
            "entropy": entropy,
            "cross_entropy": -logprobs,
            "behavior_gap": gap,
            "behavior_gap_max": gap,
        }


def k3_kl(
    logprobs: Float[Array, "rows length"], other_logprobs: Float[Array, "rows length"]
) -> Float[Array, "rows length"]:
    """The k3 estimate of KL(p || q) from tokens sampled from p: unbiased, and never negative.

        kl = q / p - log(q / p) - 1,   log(q / p) = clamp(other_logprobs - logprobs, ±20)

    Args:
      logprobs: log p(token) in nats, p the distribution that sampled the tokens.
      other_logprobs: log q(token) of the same tokens.

    Reference: Shao et al. 2024, https://arxiv.org/abs/2402.03300, eq. 4;
    Schulman 2020, http://joschu.net/blog/kl-approx.html.
    """
    log_ratio = _log_ratio(other_logprobs, logprobs)
    # expm1 keeps the digits that exp(x) - 1 loses near 0, where the two policies nearly agree.
    return jnp.expm1(log_ratio) - log_ratio


def _log_ratio(logprobs: Array, other_logprobs: Array) -> Array:
    return jnp.clip(logprobs - other_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
