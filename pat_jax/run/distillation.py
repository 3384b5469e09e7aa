"""Advantages from a teacher: how much likelier it finds each token than the policy does.

Knows the options of the algorithm and columns of a batch. Does not know models.
"""

import numpy as np

from pat_jax.config.learning import AlgorithmConfig
from pat_jax.rl.algorithm.distill_loss import distill_advantages
from pat_jax.rl.batches.batches import TrainBatch


def with_teacher(
    algorithm: AlgorithmConfig, batch: TrainBatch
) -> tuple[TrainBatch, dict[str, float]]:
    """Adds what the teacher says to the advantages of a batch, and returns its metrics.

        A_t = reward_coef * A_t of the reward + distill_coef * (log π_teacher - log π_old)(token_t)

    The batch has the columns `advantages`, `old_logprobs` and `teacher_logprobs`. Without a
    teacher it stays as it is."""
    if not algorithm.distill_coef:
        return batch, {}
    names = "old_logprobs", "teacher_logprobs"
    of_teacher = distill_advantages(*(batch.by_response(name) for name in names))
    pairs = zip(batch.by_response("advantages"), of_teacher, strict=True)
    own, weight = algorithm.reward_coef, algorithm.distill_coef
    advantages = [np.float32(own) * x + np.float32(weight) * y for x, y in pairs]
    apart, known = np.concatenate(of_teacher), np.concatenate(advantages)
    return batch.with_column("advantages", advantages), {
        "train/teacher_kl": -float(apart.mean()),
        "train/advantage_std": float(known.std()),
        "train/advantage_max": float(np.abs(known).max()),
    }
