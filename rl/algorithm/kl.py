"""Estimates of a KL divergence from log-probabilities of samples, on JAX or NumPy arrays.

On-policy distillation takes its advantages from them.

Reference: Schulman 2020, http://joschu.net/blog/kl-approx.html.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Estimator = Literal["k1", "k2", "k3"]
AnyArray = TypeVar("AnyArray", Array, np.ndarray)

# exp(20) is 4.9e8: far beyond any meaningful ratio, and far from infinity.
MAX_LOG_RATIO = 20.0


def log_ratio(logprobs: AnyArray, other_logprobs: AnyArray) -> AnyArray:
    """Returns log(p / q) in nats, clamped to ±20 so that exponential and gradient stay finite."""
    return _module(logprobs).clip(logprobs - other_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def estimate_kl(
    logprobs: AnyArray, other_logprobs: AnyArray, estimator: Estimator = "k3"
) -> AnyArray:
    """Returns estimates of KL(p || q) in nats at each token, from tokens sampled from p.

        r = log(q / p) = clamp(other_logprobs - logprobs, ±20)
        k1 = -r                 unbiased, of either sign
        k2 = r² / 2             biased, never negative; its gradient in p is that of the KL itself
        k3 = exp(r) - r - 1     unbiased, never negative (GRPO)

    Args:
      logprobs: log p(token) in nats, of any shape.
      other_logprobs: log q(token) of the same tokens.

    Reference: Schulman 2020; Shao et al. 2024, https://arxiv.org/abs/2402.03300, eq. 4 (k3).
    """
    ratio = log_ratio(other_logprobs, logprobs)
    match estimator:
        case "k1":
            return -ratio
        case "k2":
            return 0.5 * ratio**2
        case "k3":
            # expm1 keeps the digits that exp(x) - 1 loses near 0, where the policies nearly agree.
            return _module(ratio).expm1(ratio) - ratio


def kl_weight(ratio: Array, estimator: Estimator) -> Array:
    """Returns the factor that gives the estimates' mean over tokens the gradient of KL(p || q).

        k1, k3: ρ                    k2: ρ without its gradient

    On samples of p itself, where ρ is 1, the gradient of ρ k3 is log(p / q) ∇log p. The gradient of
    k3 without ρ is (1 - q / p) ∇log p, whose mean is the gradient of KL(q || p).

    Args:
      ratio: ρ, each token's probability under p over that under the policy that sampled it.

    Reference: DeepSeek-AI 2025, https://arxiv.org/abs/2512.02556, section 3.1 (k3).
    """
    return jax.lax.stop_gradient(ratio) if estimator == "k2" else ratio


def _module(array: AnyArray) -> ModuleType:
    return np if isinstance(array, np.ndarray) else jnp


def distill_advantages(
    old_logprobs: Sequence[Float[np.ndarray, " _"]],
    teacher_logprobs: Sequence[Float[np.ndarray, " _"]],
) -> list[Float[np.ndarray, " _"]]:
    """Returns the advantage of each sampled token: how much likelier it is for the teacher than for
    the policy. The arrays are float32 in the shapes of `old_logprobs`.

        A_t = log π_teacher(token_t) - log π_old(token_t)

    This is -1 times the k1 estimate of the reverse KL, and also clamped to ±20. In expectation over
    the tokens that π_old samples, the policy gradient with A is the gradient of -KL(π || π_teacher)
    at each position. A token's effect on later positions is ignored: the discount is 0.

    Args:
      old_logprobs: for each response, log-probabilities of its tokens in nats, under the policy
        before this batch's first update.
      teacher_logprobs: log-probabilities of the same tokens under the teacher.

    Reference: Lu and Thinking Machines Lab 2025,
    https://thinkingmachines.ai/blog/on-policy-distillation;
    Agarwal et al. 2023, https://arxiv.org/abs/2306.13649 (GKD).
    """
    pairs = zip(old_logprobs, teacher_logprobs, strict=True)
    return [
        -estimate_kl(old.astype(np.float64), teacher.astype(np.float64), "k1").astype(np.float32)
        for old, teacher in pairs
    ]
