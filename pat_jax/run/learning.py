"""Turns rewards into the next policy: shaping, KL in the reward, advantages, batch, update.

Knows the options of the algorithm. Does not know how responses or rewards came about.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from pat_jax.common.owners import known_to_all
from pat_jax.common.timeline import stage
from pat_jax.config.learning import AlgorithmConfig
from pat_jax.config.role_table import REFERENCE
from pat_jax.config.run import RunConfig
from pat_jax.models.kernels.row_attention import knows_branches
from pat_jax.planning import stage_names
from pat_jax.rl.algorithm.advantages import AdvantageEstimator, overlong_penalty
from pat_jax.rl.algorithm.critic_estimator import CriticEstimator
from pat_jax.rl.algorithm.gdpo import gdpo_advantages
from pat_jax.rl.algorithm.kl import estimate_kl
from pat_jax.rl.algorithm.update import TrainState
from pat_jax.rl.batches.batches import to_train_batch
from pat_jax.rl.batches.train_batch import TrainBatch
from pat_jax.rl.batches.types import FinishReason, RolloutGroup
from pat_jax.rl.rewards.by_function import ScoresByFunction
from pat_jax.run.checkpoints.skipped_steps import MOST_IN_A_ROW, NonFiniteSteps
from pat_jax.run.collect import Experience
from pat_jax.run.distillation import with_teacher
from pat_jax.run.early_columns import Columns
from pat_jax.run.logging.speed import describe_update, sequence_lengths
from pat_jax.run.process.open_run import OpenRun
from pat_jax.run.start.exit_head_state import learned_head
from pat_jax.run.start.init_state import Beginning
from pat_jax.run.start.setup import Setup
from pat_jax.run.start.shaping import KL_OF_A_TOKEN
from pat_jax.training.model_flops import training_flops
from pat_jax.training.roles import Roles, States
from pat_jax.training.trainer import POLICY, Trainer
from pat_jax.training.update_result import UpdateResult


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
    states: States,
    beta: float | None = None,
    by_function: ScoresByFunction | None = None,
    early: Columns | None = None,
) -> tuple[TrainBatch, dict[str, float]]:
    """Returns the batch of an iteration with all columns, and the metrics of its advantages.
    Responses whose reward is NaN are left out. KL in the reward compares the policy before the
    update with the reference. Its weight is `beta`; None: that of the options. `by_function` is
    needed where each function's scores are compared by themselves. `early` has columns that need
    not be predicted anymore."""
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
        shares_prompts=knows_branches(roles.policy.layout.platform),
    )
    for name, values in (early or {}).items():
        batch = batch.with_column(name, values)
    batch = roles.predict(states, batch)
    kl = _reference_kl(algorithm, roles, batch)
    if kl is not None:
        measured["reward/kl"] = float(np.mean([each.sum() for each in kl]))
        measured[KL_OF_A_TOKEN] = float(np.concatenate(kl).mean())
    if algorithm.is_by_function:
        assert by_function is not None
        columns = _advantages_by_function(by_function, lengths)
    else:
        weight = algorithm.beta if beta is None else beta
        columns = _advantages(algorithm, weight, batch, shaped, lengths, kl)
    own, top_k = columns["advantages"], config.teacher.top_k
    advantages, of_teacher = with_teacher(algorithm, batch, own, top_k)
    known = np.concatenate(advantages)
    known = known[~np.isnan(known)]
    if known.size:
        measured["train/advantage_std"] = float(known.std())
        measured["train/advantage_max"] = float(np.abs(known).max())
    for name, values in {**columns, "advantages": advantages}.items():
        batch = batch.with_column(name, [np.nan_to_num(each) for each in values])
    return batch, measured | of_teacher


def _reference_kl(
    algorithm: AlgorithmConfig, roles: Roles, batch: TrainBatch
) -> list[np.ndarray] | None:
    """Returns the KL to the reference at each token of each response, in nats; None: the reward
    has no such part."""
    if algorithm.kl_in != "reward" or REFERENCE not in roles.readers:
        return None
    columns = batch.by_response("old_logprobs"), batch.by_response("reference_logprobs")
    pairs = zip(*columns, strict=True)
    return [estimate_kl(old, other, algorithm.kl_estimator) for old, other in pairs]


def _advantages_by_function(
    by_function: ScoresByFunction, lengths: Int[np.ndarray, "groups samples"]
) -> Mapping[str, Sequence[np.ndarray]]:
    """Returns the advantages where each function's scores are compared by themselves."""
    relative = gdpo_advantages(by_function.scores, by_function.weights)
    pairs = zip(lengths.reshape(-1), relative.reshape(-1), strict=True)
    return {"advantages": [np.full(length, advantage) for length, advantage in pairs]}


def _advantages(
    algorithm: AlgorithmConfig,
    beta: float,
    batch: TrainBatch,
    rewards: Float[np.ndarray, "groups samples"],
    lengths: Int[np.ndarray, "groups samples"],
    kl: Sequence[np.ndarray] | None,
) -> Mapping[str, Sequence[np.ndarray]]:
    """Returns columns of each response's tokens, NaN where it has no reward: advantages, and with a
    critic the returns that it learns. `kl`, of each token, is subtracted from the reward."""
    whiten = algorithm.whiten_advantages
    if algorithm.baseline != "critic":
        scale, weight = algorithm.scale_rewards, 0.0 if kl is None else beta
        of_groups = AdvantageEstimator(algorithm.baseline, scale, whiten, weight)
        return {"advantages": [x for group in of_groups(rewards, lengths, kl) for x in group]}
    of_values = CriticEstimator(
        algorithm.gamma, algorithm.lam, beta, whiten, algorithm.whiten_rewards
    )
    penalties = kl or [np.zeros(n) for n in lengths.reshape(-1)]
    found = of_values(rewards.reshape(-1), penalties, batch.by_response("old_values"))
    return dict(zip(("advantages", "returns"), found, strict=True))


@dataclass(frozen=True)
class Learned:
    """What an iteration has learned from, and how."""

    batch: TrainBatch
    results: Mapping[str, UpdateResult]  # by the name of the trained role
    measured: dict[str, float]


class Learner:
    """Holds what a run learns: the states of trained roles, of rewards, and of the exit head."""

    def __init__(self, config: RunConfig, setup: Setup, began: Beginning, run: OpenRun):
        self._config, self._setup, self._roles = config, setup, setup.roles
        self.states, self._checksums = began.states, began.base_checksums
        self._shaping = began.shaping
        self._shapes = self._roles.micro_shapes
        self._rates = self._roles.learning_rates
        self._skipped = {
            role.name: NonFiniteSteps(run.folder, MOST_IN_A_ROW, run.progress.print, role.name)
            for role in self._roles.trained
        }
        depth = setup.engine.specs.drafts.exit_layer if config.train else 0
        self.exit_head = None
        if depth:
            temperature = config.rollout.temperature
            self.exit_head = learned_head(
                config.run_dir, setup.trainer, depth, self._shapes, temperature
            )
        head, step = self.exit_head, began.steps_done
        if head and step and (lost := head.restore(step)):
            run.progress.print(lost)

    @property
    def state(self) -> TrainState:
        """The policy's training state."""
        return self.states[POLICY]

    def learn(self, step: int, found: Experience) -> Learned:
        """Updates all trained roles in iteration `step`, from 1."""
        algorithm = self._config.algorithm
        shaping, rewards = self._shaping.shaped(algorithm, found.groups, found.rewards)
        beta = shaping.kl.beta
        batch, measured = training_batch(
            self._config,
            self._roles,
            self._shapes,
            found.groups,
            rewards,
            self.states,
            beta,
            found.by_function,
            found.columns,
        )
        if algorithm.penalizes_kl:
            measured["train/kl_coef"] = beta
        states, results = dict(self.states), {}
        is_trained = self.trains_policy(step)
        for role in self._roles.trained:
            if role.name == POLICY and not is_trained:
                results[role.name] = role.untouched(states[role.name])
                continue
            with stage(stage_names.update(role.title), role.layout.devices):
                states[role.name], results[role.name] = role.update(states[role.name], batch)
        for role in self._roles.trained:  # now that all have learned: some wait for others here
            name, devices = role.name, role.layout.devices
            results[name] = known_to_all(name, devices, results[name])
            measured |= results[name].metrics
        # While the policy stays as it is, its KL says nothing about β.
        responses = found.rewards.size
        self._shaping = shaping.after(measured, responses) if is_trained else shaping
        self.states = states
        return Learned(batch, results, measured)

    def trains_policy(self, step: int) -> bool:
        """Whether iteration `step`, from 1, trains the policy beside the critic."""
        return step > self._config.critic.pretrain_steps

    def learn_head(self, batch: TrainBatch) -> dict[str, float]:
        """Trains the exit head, if there is one, on the same batch. Returns its metrics."""
        return self.exit_head.trainer.learn(self.state.params, batch) if self.exit_head else {}

    def describe(
        self, groups: Sequence[RolloutGroup], learned: Learned, seconds: float
    ) -> dict[str, float]:
        """Returns the metrics of an update that took `seconds`."""
        lengths, shared = sequence_lengths(groups), learned.batch.shared
        updated = [role for role in self._roles.trained if learned.results[role.name].applied]
        passes, policy = self._config.algorithm.num_iterations, self._roles.policy
        lora = policy.trained.lora
        measured = describe_update(
            policy.policy.config,
            self._setup.devices,
            lengths,
            shared,
            passes=passes if policy in updated else 0,
            seconds=seconds,
            adapter_weights=lora.active_weights if lora else None,
            more_flops=sum(passes * _flops(x, lengths, shared) for x in updated if x != policy),
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
            self._skipped[name].note(step, learned.batch.mini_batches, result.applied)

    @property
    def kept(self) -> dict[str, Any]:
        """The training states that a checkpoint saves, by role."""
        return dict(self.states)

    @property
    def meta(self) -> dict[str, Any]:
        """The learner's entries in a checkpoint's metadata: checksums, and the state of reward
        shaping."""
        return {**self._checksums, **self._shaping.to_meta()}


def _flops(role: Trainer, lengths: np.ndarray, shared: np.ndarray) -> float:
    """Returns the floating-point operations of a role's pass over these sequences."""
    lora = role.trained.lora
    weights = lora.active_weights if lora else None
    return training_flops(role.policy.config, lengths, shared, adapter_weights=weights)
