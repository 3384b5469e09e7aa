"""On-policy distillation: the policy learns from a teacher on the responses that it samples itself.

Knows log-probabilities of policy and teacher, which share a vocabulary. Two forms:

- The sampled tokens only: `distill_advantages` go into `PolicyLoss` as any advantages do. The
  teacher gives one number for each token, as a reference does.
- Several tokens of the vocabulary at each position: `top_k_reverse_kl` is the loss at that
  position. The ids come from the pass that gives `old_logprobs`: the k likeliest tokens of the
  policy, where nearly all of the sum is, int32[rows, length, k]. The teacher returns its
  log-probabilities of these ids, float32[rows, length, k], and each update pass the policy's. Each
  set is normalised over the whole vocabulary at the rollout's temperature.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pat_jax.rl.algorithm.kl import estimate_kl, log_ratio

# Least probability of all other tokens: float32 cannot tell a smaller one from 1 - Σ p.
_LEAST_REST = 1e-7


def distill_advantages(
    old_logprobs: Sequence[Float[np.ndarray, " _"]],
    teacher_logprobs: Sequence[Float[np.ndarray, " _"]],
) -> list[Float[np.ndarray, " _"]]:
    """Returns the advantage of each sampled token: how much likelier the teacher finds it.

        A_t = log π_teacher(token_t) - log π_old(token_t)

    This is -1 times the k1 estimate of the reverse KL, and clamped to ±20 as that is. In
    expectation over the tokens that π_old samples, the policy gradient with A is the gradient of
    -KL(π || π_teacher) at each position. What a token changes at later positions has no part in it:
    the discount is 0.

    Args:
      old_logprobs: by response, in nats, under the policy before this batch's first update.
      teacher_logprobs: of the same tokens, under the teacher.

    Returns:
      Arrays of float32 in the shapes of `old_logprobs`.

    Reference: Lu and Thinking Machines Lab 2025,
    https://thinkingmachines.ai/blog/on-policy-distillation;
    Agarwal et al. 2023, https://arxiv.org/abs/2306.13649 (GKD).
    """
    pairs = zip(old_logprobs, teacher_logprobs, strict=True)
    return [
        -estimate_kl(old.astype(np.float64), teacher.astype(np.float64), "k1").astype(np.float32)
        for old, teacher in pairs
    ]


def top_k_reverse_kl(
    logprobs: Float[Array, "*position k"], teacher_logprobs: Float[Array, "*position k"]
) -> Float[Array, "*position"]:
    """Returns KL(policy || teacher) in nats, with all tokens but k counted as one.

        Σ_i p_i log(p_i / q_i) + p_rest log(p_rest / q_rest),    p_rest = 1 - Σ_i p_i

    p are the policy's probabilities and q the teacher's. This is at most the KL of the whole
    vocabulary, and equal to it if the two agree on the proportions of the other tokens, or if there
    are none. Log-ratios are clamped to ±20. p_rest and q_rest are at least 1e-7.

    Args:
      logprobs: the policy's, of k different tokens at each position, in nats. They have a gradient.
      teacher_logprobs: of the same tokens.

    Reference: Agarwal et al. 2023, https://arxiv.org/abs/2306.13649, section 2 (reverse KL).
    """
    policy, teacher = jnp.exp(logprobs), jnp.exp(teacher_logprobs)
    rest = jnp.maximum(1.0 - policy.sum(axis=-1), _LEAST_REST)
    teacher_rest = jnp.maximum(1.0 - teacher.sum(axis=-1), _LEAST_REST)
    apart = jnp.sum(policy * log_ratio(logprobs, teacher_logprobs), axis=-1)
    return apart + rest * log_ratio(jnp.log(rest), jnp.log(teacher_rest))
