"""What the update minimises. Knows log-probabilities and weights, not models, tokens or batches.

Per-token arrays are [rows, length]; position t belongs to the target, the token after position t.
Every loss is a plain sum over tokens times `weights`, which are computed once for a whole mini-batch
(`batches.py`): adding the gradients of its micro-batches gives exactly the mini-batch's gradient.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pat_jax.common.pytree import pytree_dataclass

MAX_LOG_RATIO = (
    20.0  # exp of it is 4.9e8: far beyond any ratio that means something, far from infinity
)


@pytree_dataclass
class LossSums:
    """Sums over tokens times weights, of all micro-batches of a mini-batch."""

    loss: Float[Array, ""]
    weight: Float[Array, ""]  # of all tokens: what the sums are to be divided by for their means
    clip_fraction: Float[Array, ""]  # tokens whose policy gradient the clip has cut to zero
    approx_kl: Float[Array, ""]  # KL(old || policy) in nats, k3 estimate
    reference_kl: Float[Array, ""]  # KL(policy || reference) in nats, k3 estimate
    entropy: Float[Array, ""]  # of the policy's next-token distribution, nats
    behavior_gap: Float[Array, ""]  # |old - behavior| of the log-probabilities, nats
    behavior_gap_max: Float[Array, ""]  # the largest of them, not a mean

    def add(self, other: "LossSums") -> "LossSums":
        total = jax.tree.map(jnp.add, self, other)
        largest = jnp.maximum(self.behavior_gap_max, other.behavior_gap_max)
        return LossSums(**{**vars(total), "behavior_gap_max": largest})

    def metrics(self) -> dict[str, float]:
        """The loss, and the weighted means of what is beside it; on the host."""
        sums = {name: float(value) for name, value in vars(self).items()}
        weight, whole = sums.pop("weight"), ("loss", "behavior_gap_max")
        share = 1 / weight if weight > 0 else 0.0
        return {name: x if name in whole else x * share for name, x in sums.items()}


def zero_sums() -> LossSums:
    return LossSums(*(jnp.zeros(()) for _ in range(8)))


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


def grpo_loss(
    logprobs: Float[Array, "rows length"],
    old_logprobs: Float[Array, "rows length"],
    advantages: Float[Array, " rows"],
    weights: Float[Array, "rows length"],
    *,
    epsilon: float = 0.2,
    epsilon_high: float = 0.2,
    dual_clip: float = 3.0,
    beta: float = 0.0,
    reference_logprobs: Float[Array, "rows length"] | None = None,
    behavior_logprobs: Float[Array, "rows length"] | None = None,
    entropy: Float[Array, "rows length"] | None = None,
) -> tuple[Float[Array, ""], LossSums]:
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

    Args:
      logprobs: log π(token) in nats under the policy being updated.
      old_logprobs: the same under the policy before this batch's first update; no gradient.
      advantages: one for each row.
      weights: of each token, 0 where it is no part of the loss. All zeros give 0, not NaN; what
        the other arrays hold where a weight is 0 has no influence, not even NaN.
      epsilon: ε, the lower clip.
      epsilon_high: ε_high, the upper clip (above ε: clip-higher).
      dual_clip: c, the most that a ratio counts for where A < 0: without it nothing bounds the
        gradient of a token that has become likelier but should not. 0 leaves it out, as the paper.
      beta: β; 0 needs no `reference_logprobs`.
      reference_logprobs: log-probabilities under the frozen reference policy; no gradient.
      behavior_logprobs: under the rollout's policy, before top-k and top-p; a metric only.
      entropy: of the policy at each position; a metric only.

    Returns:
      The loss, and the same loss with its metrics as sums (without gradient).

    Reference: Shao et al. 2024, https://arxiv.org/abs/2402.03300, eq. 3 and 4;
    Yu et al. 2025, https://arxiv.org/abs/2503.14476, eq. 8 (clip-higher, token average);
    Ye et al. 2020, https://arxiv.org/abs/1912.09729, eq. 5 (dual clip).
    """
    if beta != 0 and reference_logprobs is None:
        raise ValueError(
            f"beta={beta} needs reference_logprobs; got None. Use beta=0, or fill them."
        )
    is_counted = weights > 0
    # Selecting before exp, not after, keeps NaN and overflow of ignored tokens out of the gradient.
    logprobs = jnp.where(is_counted, logprobs, 0.0)
    old = jax.lax.stop_gradient(jnp.where(is_counted, old_logprobs, 0.0))
    advantage = advantages[:, None]

    ratio = jnp.exp(_log_ratio(logprobs, old))
    clipped = jnp.clip(ratio, 1.0 - epsilon, 1.0 + epsilon_high)
    gain = jnp.minimum(ratio * advantage, clipped * advantage)
    if dual_clip:
        gain = jnp.where(advantage < 0, jnp.maximum(gain, dual_clip * advantage), gain)
    reference_kl = jnp.zeros_like(logprobs)
    if reference_logprobs is not None:
        reference = jnp.where(is_counted, reference_logprobs, 0.0)
        reference_kl = k3_kl(logprobs, jax.lax.stop_gradient(reference))
    loss = jnp.sum(weights * (beta * reference_kl - gain))

    is_clipped = gain != ratio * advantage
    gap = _behavior_gap(old, behavior_logprobs, is_counted)
    sums = LossSums(
        loss=loss,
        weight=jnp.sum(weights),
        clip_fraction=jnp.sum(weights * is_clipped.astype(weights.dtype)),
        approx_kl=jnp.sum(weights * k3_kl(old, logprobs)),
        reference_kl=jnp.sum(weights * reference_kl),
        entropy=_weighted_sum(weights, entropy),
        behavior_gap=jnp.sum(weights * gap),
        behavior_gap_max=jnp.max(gap),
    )
    return loss, jax.lax.stop_gradient(sums)


def supervised_loss(
    logprobs: Float[Array, "rows length"],
    weights: Float[Array, "rows length"],
    *,
    entropy: Float[Array, "rows length"] | None = None,
) -> tuple[Float[Array, ""], LossSums]:
    """The cross-entropy of the target tokens, -Σ weights * logprobs.

    Args:
      logprobs: log π(token) in nats.
      weights: of each token, 0 where it is no part of the loss.
      entropy: of the policy at each position; a metric only.

    Returns:
      The loss, and the same loss as sums (without gradient; those of GRPO alone stay 0).
    """
    loss = -jnp.sum(weights * jnp.where(weights > 0, logprobs, 0.0))
    sums = replace(
        zero_sums(),
        loss=loss,
        weight=jnp.sum(weights),
        entropy=_weighted_sum(weights, entropy),
    )
    return loss, jax.lax.stop_gradient(sums)


def _log_ratio(logprobs: Array, other_logprobs: Array) -> Array:
    return jnp.clip(logprobs - other_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _weighted_sum(weights: Array, values: Array | None) -> Array:
    return (
        jnp.zeros(()) if values is None else jnp.sum(jnp.where(weights > 0, weights * values, 0.0))
    )


def _behavior_gap(old: Array, behavior: Array | None, is_counted: Array) -> Array:
    return (
        jnp.zeros_like(old)
        if behavior is None
        else jnp.where(is_counted, jnp.abs(old - behavior), 0.0)
    )
