"""From rewards to what the update is given: shaping, KL in the reward, advantages, a batch.

Knows the options of the algorithm. Does not know how responses or rewards came about.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from pat_jax.config.run import RunConfig
from pat_jax.models.policy import Params
from pat_jax.rl.algorithm.advantages import AdvantageEstimator, overlong_penalty
from pat_jax.rl.algorithm.update import TrainState
from pat_jax.rl.batches.batches import TrainBatch, to_train_batch
from pat_jax.rl.batches.types import FinishReason, RolloutGroup
from pat_jax.training.build import shares_prompts
from pat_jax.training.trainer import Trainer


def nothing_to_learn(
    config: RunConfig, groups: Sequence[RolloutGroup], rewards: Float[np.ndarray, "groups samples"]
) -> str:
    """Why no response of an iteration is in the loss, in a sentence; empty where one is."""
    said = [one for group in groups for one in group.rollouts]
    is_cut = np.array([one.finish is FinishReason.LENGTH for one in said])
    is_masked = is_cut & (config.algorithm.truncated == "mask")
    has_reward = ~np.isnan(rewards.reshape(-1))
    if (has_reward & ~is_masked).any():
        return ""
    longest, without = config.rollout.max_completion_length, int((~has_reward & ~is_masked).sum())
    others = f", but for {without} that have no reward" if without else ""
    if not is_masked.any():
        return f"none of the {len(said)} responses of this step has a reward: nothing is learned"
    return (
        f"all {len(said)} responses of this step{others} were cut off at {longest} tokens and are masked "
        "(--algorithm.truncated mask): nothing is learned; raise --rollout.max_completion_length"
    )


def training_batch(
    config: RunConfig,
    trainer: Trainer,
    micro_shapes: Sequence[tuple[int, int]],
    groups: Sequence[RolloutGroup],
    rewards: Float[np.ndarray, "groups samples"],
    state: TrainState,
    reference: Params | None,
) -> tuple[TrainBatch, dict[str, float]]:
    """
    Args:
      rewards: NaN for a response that has none and is left out.
      state, reference: of the policies that KL in the reward compares.

    Returns:
      The batch of an iteration, and the metrics of its advantages.
    """
    algorithm, cap = config.algorithm, config.rollout.max_completion_length
    lengths = np.array([[len(one.tokens) for one in group.rollouts] for group in groups])
    penalties = overlong_penalty(
        lengths, cap, share=algorithm.overlong_buffer, penalty=algorithm.overlong_penalty
    )
    shaped, measured = rewards - penalties, {}
    if algorithm.overlong_buffer:
        measured["reward/overlong_penalty"] = float(penalties.mean())
    batch = to_train_batch(
        groups,
        shaped,  # which responses have a reward; advantages follow
        mini_batch_size=algorithm.mini_batch_size,
        micro_shapes=micro_shapes,
        aggregation=algorithm.loss_aggregation,
        truncated=algorithm.truncated,
        max_completion_length=cap,
        shares_prompts=shares_prompts(config, trainer.layout.platform),
    )
    kl, beta = None, 0.0
    if algorithm.kl_in == "reward" and reference is not None:
        beta = algorithm.beta
        batch, kl = trainer.reference_kl(state, batch, reference, algorithm.kl_estimator)
        measured["reward/kl"] = float(np.mean([each.sum() for each in kl]))
    estimator = AdvantageEstimator(
        algorithm.baseline, algorithm.scale_rewards, algorithm.whiten_advantages, beta
    )
    advantages = [one for group in estimator(shaped, lengths, kl) for one in group]
    known = np.concatenate(advantages)
    known = known[~np.isnan(known)]
    if known.size:
        measured["train/advantage_std"] = float(known.std())
        measured["train/advantage_max"] = float(np.abs(known).max())
    return batch.with_column("advantages", [np.nan_to_num(one) for one in advantages]), measured
