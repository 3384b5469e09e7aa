"""Turns the rewards of an iteration into the advantages of its response tokens.

Advantages include length penalties, the KL to the reference and a teacher's term. Knows the options
of the algorithm and the columns of a batch. Does not know models, nor how rewards are computed.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int

from pat_jax.config.learning import AlgorithmConfig
from pat_jax.rl.algorithm.advantages import (
    AdvantageEstimator,
    gdpo_advantages,
    overlong_penalty,
)
from pat_jax.rl.algorithm.critic_estimator import CriticEstimator
from pat_jax.rl.algorithm.kl import distill_advantages, estimate_kl
from pat_jax.rl.batches.train_batch import TrainBatch
from pat_jax.run.collect import ScoredGroups
from pat_jax.run.start.shaping import KL_OF_A_TOKEN

OfTokens = Sequence[np.ndarray]  # one array per response, group by group: a value per token


def penalized(
    algorithm: AlgorithmConfig,
    rewards: Float[np.ndarray, "groups samples"],
    lengths: Int[np.ndarray, "groups samples"],
    longest: int,
) -> tuple[Float[np.ndarray, "groups samples"], dict[str, float]]:
    """Subtracts the penalties of long responses. Returns the penalized rewards, and metrics.

    Args:
      lengths: tokens of each response.
      longest: the limit of a response's tokens (`max_completion_length`).
    """
    buffer = algorithm.overlong_buffer
    if not algorithm.reward_coef:
        rewards = np.zeros_like(rewards)  # also of responses without a reward: the teacher suffices
    penalties = overlong_penalty(lengths, longest, share=buffer, penalty=algorithm.overlong_penalty)
    measured = {"reward/overlong_penalty": float(penalties.mean())} if buffer else {}
    return rewards - penalties, measured


def with_advantages(
    algorithm: AlgorithmConfig,
    batch: TrainBatch,
    scored: ScoredGroups,
    rewards: Float[np.ndarray, "groups samples"],
    *,
    beta: float,
    teacher_top_k: int = 0,
) -> tuple[TrainBatch, dict[str, float]]:
    """Adds the column `advantages`, with a critic also `returns`. Returns that batch and metrics.

    Args:
      batch: has the columns that models predict, such as `old_logprobs`.
      rewards: the rewards to learn from; `scored.rewards` are not used.
      beta: weight of the KL to the reference in the reward.
      teacher_top_k: see `with_teacher`.
    """
    kl = _reference_kl(algorithm, batch)
    measured = {}
    if kl:
        measured["reward/kl"] = float(np.mean([each.sum() for each in kl]))
        measured[KL_OF_A_TOKEN] = float(np.concatenate(kl).mean())
    columns = _columns(algorithm, batch, scored, rewards, kl, beta)
    advantages, of_teacher = with_teacher(algorithm, batch, columns["advantages"], teacher_top_k)
    known = np.concatenate(advantages)
    known = known[~np.isnan(known)]
    if known.size:
        measured["train/advantage_std"] = float(known.std())
        measured["train/advantage_max"] = float(np.abs(known).max())
    for name, values in {**columns, "advantages": advantages}.items():
        batch = batch.with_column(name, [np.nan_to_num(each) for each in values])
    return batch, measured | of_teacher


def _columns(
    algorithm: AlgorithmConfig,
    batch: TrainBatch,
    scored: ScoredGroups,
    rewards: Float[np.ndarray, "groups samples"],
    kl: OfTokens | None,
    beta: float,
) -> Mapping[str, OfTokens]:
    """Returns the column of advantages, and with a critic the column of returns, which the critic
    learns to predict. Both are NaN where a response has no reward."""
    whiten = algorithm.whiten_advantages
    if algorithm.is_by_function:
        relative = gdpo_advantages(scored.by_function.scores, scored.by_function.weights)
        pairs = zip(scored.lengths.reshape(-1), relative.reshape(-1), strict=True)
        return {"advantages": [np.full(length, advantage) for length, advantage in pairs]}
    if algorithm.baseline != "critic":
        weight = beta if kl else 0.0
        estimate = AdvantageEstimator(algorithm.baseline, algorithm.scale_rewards, whiten, weight)
        of_groups = estimate(rewards, scored.lengths, kl)
        return {"advantages": [each for group in of_groups for each in group]}
    of_critic = CriticEstimator(
        algorithm.gamma, algorithm.lam, beta, whiten, algorithm.whiten_rewards
    )
    values = batch.by_response("old_values")
    no_kl = [np.zeros(len(each)) for each in values]
    advantages, returns = of_critic(rewards.reshape(-1), kl or no_kl, values)
    return {"advantages": advantages, "returns": returns}


def _reference_kl(algorithm: AlgorithmConfig, batch: TrainBatch) -> OfTokens | None:
    """Returns each token's KL to the reference in nats, or None if the reward has no KL term."""
    if not algorithm.penalizes_kl:
        return None
    old = batch.by_response("old_logprobs")
    reference = batch.by_response("reference_logprobs")
    pairs = zip(old, reference, strict=True)
    return [estimate_kl(one, other, algorithm.kl_estimator) for one, other in pairs]


def with_teacher(
    algorithm: AlgorithmConfig,
    batch: TrainBatch,
    advantages: Sequence[np.ndarray],
    top_k: int = 0,
) -> tuple[Sequence[np.ndarray], dict[str, float]]:
    """Adds the teacher's term to the advantages of each response. Returns the sums, and metrics.

        A_t = reward_coef * A_t of the reward + distill_coef * (log π_teacher - log π_old)(token_t)

    `batch` must have the columns `old_logprobs` and `teacher_logprobs`. Without a teacher the
    advantages do not change. If `top_k` is above 0, the loss compares with the teacher
    (`top_k_reverse_kl`), and the advantages come from the reward alone."""
    if not algorithm.distill_coef:
        return advantages, {}
    own, weight = np.float32(algorithm.reward_coef), np.float32(algorithm.distill_coef)
    if top_k:
        return [own * x for x in advantages], {}
    of_teacher = distill_advantages(
        batch.by_response("old_logprobs"), batch.by_response("teacher_logprobs")
    )
    added = [own * x + weight * y for x, y in zip(advantages, of_teacher, strict=True)]
    return added, {"train/teacher_kl": -float(np.concatenate(of_teacher).mean())}
