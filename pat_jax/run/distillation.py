"""Advantages from a teacher: how much likelier it finds each token than the policy does.

Knows the options of the algorithm and columns of a batch. Does not know models.
"""

from collections.abc import Sequence

import numpy as np

from pat_jax.config.learning import AlgorithmConfig
from pat_jax.rl.algorithm.distillation import distill_advantages
from pat_jax.rl.batches.train_batch import TrainBatch


def with_teacher(
    algorithm: AlgorithmConfig,
    batch: TrainBatch,
    advantages: Sequence[np.ndarray],
    top_k: int = 0,
) -> tuple[Sequence[np.ndarray], dict[str, float]]:
    """Adds the teacher's term to the advantages of each response. Returns the sums, and metrics.

        A_t = reward_coef * A_t of the reward + distill_coef * (log π_teacher - log π_old)(token_t)

    The batch has the columns `old_logprobs` and `teacher_logprobs`. Without a teacher the
    advantages stay as they are. With `top_k` the teacher is in the loss (`top_k_reverse_kl`), and
    the advantages are those of the reward alone."""
    if not algorithm.distill_coef:
        return advantages, {}
    own, weight = np.float32(algorithm.reward_coef), np.float32(algorithm.distill_coef)
    if top_k:
        return [own * x for x in advantages], {}
    names = "old_logprobs", "teacher_logprobs"
    of_teacher = distill_advantages(*(batch.by_response(name) for name in names))
    added = [own * x + weight * y for x, y in zip(advantages, of_teacher, strict=True)]
    return added, {"train/teacher_kl": -float(np.concatenate(of_teacher).mean())}
