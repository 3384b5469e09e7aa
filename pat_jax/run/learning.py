"""Turns rewards into the next policy: shaping, KL in the reward, advantages, batch, update.

Knows the options of the algorithm. Does not know how responses or rewards came about.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from pat_jax.config.learning import AlgorithmConfig
from pat_jax.config.run import RunConfig
from pat_jax.rl.algorithm.advantages import AdvantageEstimator, overlong_penalty
from pat_jax.rl.algorithm.kl import estimate_kl
from pat_jax.rl.algorithm.update import TrainState
from pat_jax.rl.batches.batches import TrainBatch, to_train_batch
from pat_jax.rl.batches.types import FinishReason, RolloutGroup
from pat_jax.run.checkpoints.exit_head_state import learned_head
from pat_jax.run.checkpoints.skipped_steps import NonFiniteSteps
from pat_jax.run.collect import Experience
from pat_jax.run.distillation import with_teacher
from pat_jax.run.logging.speed import describe_update, sequence_lengths
from pat_jax.run.process.open_run import OpenRun
from pat_jax.run.setup import Setup
from pat_jax.run.start.init_state import Beginning
from pat_jax.training.build import learning_rates, micro_shapes, shares_prompts
from pat_jax.training.roles import REFERENCE, Roles
from pat_jax.training.trainer import UpdateResult


def nothing_to_learn(
    config: RunConfig, groups: Sequence[RolloutGroup], rewards: Float[np.ndarray, "groups samples"]
) -> str:
    """Returns a sentence on why no response of an iteration is in the loss, or "" if one is."""
    responses = [one for group in groups for one in group.rollouts]
    is_cut = np.array([one.finish is FinishReason.LENGTH for one in responses])
    is_masked = is_cut & (config.algorithm.truncated == "mask")
    has_reward = ~np.isnan(rewards.reshape(-1)) | (config.algorithm.reward_coef == 0)
    if (has_reward & ~is_masked).any():
        return ""
    longest, without = config.rollout.max_completion_length, int((~has_reward & ~is_masked).sum())
    others = f", but for {without} that have no reward" if without else ""
    if not is_masked.any():
        none = f"none of the {len(responses)} responses of this step has a reward"
        return f"{none}: nothing is learned"
    return (
        f"all {len(responses)} responses of this step{others} were cut off at {longest} tokens and are masked "
        "(--algorithm.truncated mask): nothing is learned; raise --rollout.max_completion_length"
    )


def training_batch(
    config: RunConfig,
    roles: Roles,
    micro_shapes: Sequence[tuple[int, int]],
    groups: Sequence[RolloutGroup],
    rewards: Float[np.ndarray, "groups samples"],
    state: TrainState,
) -> tuple[TrainBatch, dict[str, float]]:
    """Returns the batch of an iteration with all columns, and the metrics of its advantages.
    Responses whose reward is NaN are left out. KL in the reward compares the policy of `state` with
    the reference."""
    algorithm, cap = config.algorithm, config.rollout.max_completion_length
    buffer = algorithm.overlong_buffer
    if not algorithm.reward_coef:
        rewards = np.zeros_like(rewards)  # also where a reward failed: the teacher says enough
    lengths = np.array([[len(one.tokens) for one in group.rollouts] for group in groups])
    penalties = overlong_penalty(lengths, cap, share=buffer, penalty=algorithm.overlong_penalty)
    shaped, measured = rewards - penalties, {}
    if buffer:
        measured["reward/overlong_penalty"] = float(penalties.mean())
    batch = to_train_batch(
        groups,
        shaped,  # which responses have a reward; advantages follow
        mini_batch_size=algorithm.mini_batch_size,
        micro_shapes=micro_shapes,
        aggregation=algorithm.loss_aggregation,
        truncated=algorithm.truncated,
        max_completion_length=cap,
        shares_prompts=shares_prompts(config, roles.policy.layout.platform),
    )
    batch, kl = roles.read(batch), None
    if algorithm.kl_in == "reward" and REFERENCE in roles.readers:
        batch = roles.policy.predict(state, batch)
        columns = batch.by_response("old_logprobs"), batch.by_response("reference_logprobs")
        pairs = zip(*columns, strict=True)
        kl = [estimate_kl(old, other, algorithm.kl_estimator) for old, other in pairs]
        measured["reward/kl"] = float(np.mean([each.sum() for each in kl]))
    advantages, described = _advantages(algorithm, shaped, lengths, kl)
    if algorithm.distill_coef:
        batch = roles.policy.predict(state, batch)
    batch, of_teacher = with_teacher(algorithm, batch.with_column("advantages", advantages))
    return batch, measured | described | of_teacher


def _advantages(
    algorithm: AlgorithmConfig,
    rewards: Float[np.ndarray, "groups samples"],
    lengths: Int[np.ndarray, "groups samples"],
    kl: Sequence[np.ndarray] | None,
) -> tuple[list[np.ndarray], dict[str, float]]:
    """Returns the token advantages of each response, 0 where it has no reward, and their metrics.
    `kl`, of each token, is subtracted from the reward."""
    estimator = AdvantageEstimator(
        algorithm.baseline,
        algorithm.scale_rewards,
        algorithm.whiten_advantages,
        0.0 if kl is None else algorithm.beta,
    )
    advantages = [one for group in estimator(rewards, lengths, kl) for one in group]
    known = np.concatenate(advantages)
    known = known[~np.isnan(known)]
    measured: dict[str, float] = {}
    if known.size:
        measured["train/advantage_std"] = float(known.std())
        measured["train/advantage_max"] = float(np.abs(known).max())
    return [np.nan_to_num(one) for one in advantages], measured


class Learner:
    """Holds the training state of a run: policy, optimizer and exit head."""

    def __init__(self, config: RunConfig, setup: Setup, began: Beginning, run: OpenRun):
        self._config, self._setup, self._trainer = config, setup, setup.trainer
        self.state = began.state
        self.base_checksum = began.base_checksum
        layout = setup.trainer.layout
        self._shapes = micro_shapes(config, layout.split.dp, layout.platform)
        self._rates = learning_rates(config)
        self._skipped = NonFiniteSteps(run.folder, config.optimizer.max_skipped, run.progress.print)
        self.exit_head = learned_head(config, setup, self._shapes)
        head, step = self.exit_head, began.steps_done
        if head and step and (lost := head.restore(step)):
            run.progress.print(lost)

    def learn(self, found: Experience) -> tuple[TrainBatch, UpdateResult, dict[str, float]]:
        """Updates the policy. Returns the batch, the result of the update, and metrics."""
        made_of = self._shapes, found.groups, found.rewards, self.state
        batch, measured = training_batch(self._config, self._setup.roles, *made_of)
        self.state, result = self._trainer.update(self.state, batch)
        return batch, result, measured | result.metrics

    def learn_head(self, batch: TrainBatch) -> dict[str, float]:
        """Trains the exit head, if there is one, on the same batch. Returns its metrics."""
        return self.exit_head.trainer.learn(self.state.params, batch) if self.exit_head else {}

    def describe(
        self,
        groups: Sequence[RolloutGroup],
        batch: TrainBatch,
        result: UpdateResult,
        seconds: float,
    ) -> dict[str, float]:
        """Returns the metrics of an update that took `seconds`."""
        lora, lengths = self._trainer.trained.lora, sequence_lengths(groups)
        speed = describe_update(
            self._setup.policy.config,
            self._setup.devices,
            lengths,
            batch.shared,
            passes=self._config.algorithm.num_iterations,
            seconds=seconds,
            adapter_weights=lora.active_weights if lora else None,
        )
        return speed | {
            "train/padding_efficiency": batch.padding_efficiency,
            "train/shared_tokens": float(batch.shared.sum() / lengths.sum()),
            "train/learning_rate": float(self._rates(max(0, result.updates_applied - 1))),
        }

    def note_skipped(self, step: int, batch: TrainBatch, result: UpdateResult) -> None:
        """Raises UserError if too many optimizer steps in a row were skipped."""
        self._skipped.note(step, batch.mini_batches, result.applied)

    @property
    def kept(self) -> dict[str, Any]:
        """The state that a checkpoint saves."""
        return {"train": self.state}
