"""Turns rewards into the next policy: predictions of models, advantages (`advantages.py`), updates.

Knows the trained models of a run. Does not know how responses are generated or rewarded.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float

from pat_jax.common.owners import known_to_all
from pat_jax.common.timeline import stage
from pat_jax.config.learning import AlgorithmConfig
from pat_jax.models.kernels.row_attention import knows_branches
from pat_jax.planning import stage_names
from pat_jax.rl.algorithm.update import TrainState
from pat_jax.rl.batches.batches import to_train_batch
from pat_jax.rl.batches.packing import Shape
from pat_jax.rl.batches.train_batch import TrainBatch
from pat_jax.rl.batches.types import FinishReason, RolloutGroup
from pat_jax.run.advantages import penalized, with_advantages
from pat_jax.run.checkpoints.skipped_steps import MOST_IN_A_ROW, NonFiniteSteps
from pat_jax.run.collect import Experience, ScoredGroups
from pat_jax.run.logging.speed import describe_update, flops_of, sequence_lengths
from pat_jax.run.process.open_run import OpenRun
from pat_jax.run.start.exit_head_state import learned_head
from pat_jax.run.start.init_state import Beginning
from pat_jax.run.start.setup import Setup
from pat_jax.training.trainer import POLICY
from pat_jax.training.update_result import UpdateResult


def nothing_to_learn(algorithm: AlgorithmConfig, scored: ScoredGroups, longest: int) -> str:
    """Returns a sentence on why no response is in the loss, or "" if some response is."""
    responses = [one for group in scored.groups for one in group.rollouts]
    is_cut = np.array([one.finish is FinishReason.LENGTH for one in responses])
    is_masked = is_cut & (algorithm.truncated == "mask")
    has_reward = ~np.isnan(scored.rewards.reshape(-1)) | (algorithm.reward_coef == 0)
    if (has_reward & ~is_masked).any():
        return ""
    without = int((~has_reward & ~is_masked).sum())
    others = f", except {without} without a reward," if without else ""
    if not is_masked.any():
        none = f"none of the {len(responses)} responses of this step has a reward"
        return f"{none}: nothing is learned"
    return (
        f"all {len(responses)} responses of this step{others} were cut off at {longest} tokens and are masked "
        "(--algorithm.truncated mask): nothing is learned; raise --rollout.max_completion_length"
    )


def training_batch(
    algorithm: AlgorithmConfig,
    scored: ScoredGroups,
    rewards: Float[np.ndarray, "groups samples"],
    read: Callable[[TrainBatch], TrainBatch],
    *,
    beta: float,
    micro_shapes: Sequence[Shape],
    longest: int,
    shares_prompts: bool = False,
    teacher_top_k: int = 0,
) -> tuple[TrainBatch, dict[str, float]]:
    """Returns the batch of an iteration with all columns, and the metrics of its advantages.

    Args:
      rewards: the rewards to learn from. A response whose reward is NaN is left out.
      read: adds the columns that models predict before the update, except those already there.
      beta: weight of the KL to the reference in the reward.
      longest: the limit of a response's tokens (`max_completion_length`).
    """
    rewards, measured = penalized(algorithm, rewards, scored.lengths, longest)
    batch = to_train_batch(
        scored.groups,
        rewards,  # here only to mark responses without a reward
        mini_batch_size=algorithm.mini_batch_size,
        micro_shapes=micro_shapes,
        aggregation=algorithm.loss_aggregation,
        truncated=algorithm.truncated,
        max_completion_length=longest,
        shares_prompts=shares_prompts,
    )
    for name, values in scored.columns.items():
        batch = batch.with_column(name, values)
    batch, more = with_advantages(
        algorithm, read(batch), scored, rewards, beta=beta, teacher_top_k=teacher_top_k
    )
    return batch, measured | more


@dataclass(frozen=True)
class Learned:
    """The batch that an iteration has learned from, and the results of its updates."""

    batch: TrainBatch
    results: Mapping[str, UpdateResult]  # results of the updates by the name of the trained role
    measured: dict[str, float]


class Learner:
    """Holds the states of trained models, of reward shaping, and of the exit head."""

    def __init__(self, setup: Setup, began: Beginning, files: OpenRun):
        config = setup.config
        self._setup = setup
        self._roles = setup.roles
        self._algorithm = config.algorithm
        self.states = began.states
        self._checksums = began.base_checksums
        self._shaping = began.shaping
        self._rates = self._roles.learning_rates
        self._training_batch = partial(
            training_batch,
            replace(config.algorithm, mini_batch_size=config.mini_batch_size),
            micro_shapes=self._roles.micro_shapes,
            longest=config.rollout.max_completion_length,
            shares_prompts=knows_branches(setup.trainer.layout.platform),
            teacher_top_k=config.teacher.top_k,
        )
        notify = files.progress.print
        self._skipped = {
            role.name: NonFiniteSteps(MOST_IN_A_ROW, notify, role.name)
            for role in self._roles.trained
        }
        depth = setup.engine.specs.drafts.exit_layer if config.train else 0
        self.exit_head = None
        if depth:
            self.exit_head = learned_head(
                config.run_dir,
                setup.trainer,
                depth,
                self._roles.micro_shapes,
                config.rollout.temperature,
            )
        head = self.exit_head
        step = began.steps_done
        if head and step and (lost := head.restore(step)):
            notify(lost)

    @property
    def state(self) -> TrainState:
        """The policy's training state."""
        return self.states[POLICY]

    def learn(self, found: Experience) -> Learned:
        """Predicts columns, computes advantages, and updates all trained roles."""
        scored = found.scored
        is_trained = found.step > self._setup.config.critic.pretrain_steps  # the policy
        shaping, rewards = self._shaping.shaped(self._algorithm, scored.groups, scored.rewards)
        read = partial(self._roles.predict, self.states)
        beta = shaping.kl.beta
        batch, measured = self._training_batch(scored, rewards, read, beta=beta)
        if self._algorithm.penalizes_kl:
            measured["train/kl_coef"] = beta
        states, results = self._updated(batch, with_policy=is_trained)
        for role in self._roles.trained:  # after all updates: processes wait here
            devices = role.layout.devices
            results[role.name] = known_to_all(role.name, devices, results[role.name])
            measured |= results[role.name].metrics
        # While the policy is not trained, its KL does not depend on β.
        self._shaping = shaping.after(measured, rewards.size) if is_trained else shaping
        self.states = states
        return Learned(batch, results, measured)

    def _updated(
        self, batch: TrainBatch, *, with_policy: bool
    ) -> tuple[dict[str, TrainState], dict[str, UpdateResult]]:
        """Returns the states of all trained roles after the updates, and the updates' results."""
        states = dict(self.states)
        results = dict[str, UpdateResult]()
        for role in self._roles.trained:
            if role.name == POLICY and not with_policy:
                results[role.name] = role.untouched(states[role.name])
                continue
            with stage(stage_names.update(role.title), role.layout.devices):
                states[role.name], results[role.name] = role.update(states[role.name], batch)
        return states, results

    def learn_head(self, batch: TrainBatch) -> dict[str, float]:
        """Trains the exit head, if there is one, on the same batch. Returns its metrics."""
        return self.exit_head.trainer.learn(self.state.params, batch) if self.exit_head else {}

    def describe(
        self, groups: Sequence[RolloutGroup], learned: Learned, seconds: float
    ) -> dict[str, float]:
        """Returns the metrics of an update that took `seconds`."""
        lengths = sequence_lengths(groups)
        shared = learned.batch.shared
        updated = [role for role in self._roles.trained if learned.results[role.name].applied]
        flops = sum(flops_of(role.trained, lengths, shared) for role in updated)
        measured = describe_update(
            self._setup.devices,
            lengths,
            shared,
            seconds=seconds,
            flops=self._algorithm.num_iterations * flops,
        )
        measured["train/padding_efficiency"] = learned.batch.padding_efficiency
        measured["train/tokens"] = int((lengths - shared).sum())
        measured["train/shared_tokens"] = float(shared.sum() / lengths.sum())
        for role in updated:
            step = max(0, learned.results[role.name].updates_applied - 1)
            measured[f"{role.name}/learning_rate"] = float(self._rates[role.name](step))
        return measured

    def note_skipped(self, step: int, learned: Learned) -> None:
        """Raises UserError if too many optimizer steps in a row of a role were skipped."""
        for name, result in learned.results.items():
            self._skipped[name].note(step, result.applied)

    @property
    def meta(self) -> dict[str, Any]:
        """The learner's entries in a checkpoint's metadata: checksums, and the state of reward
        shaping."""
        return {**self._checksums, **self._shaping.to_meta()}
