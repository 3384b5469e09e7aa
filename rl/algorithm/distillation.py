"""On-policy distillation: the policy learns from a teacher on the responses that it samples itself.

Knows log-probabilities of policy and teacher, which share a vocabulary. The teacher returns one
log-probability for each sampled token, as a reference does.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from pat_jax.rl.algorithm.kl import estimate_kl


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
