"""Builds the handles of a run's models: trainers and readers.

Knows rows of the table of roles. Does not know data, checkpoints or which devices there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pat_jax.common.pytree import on_devices
from pat_jax.config.learning import AlgorithmConfig
from pat_jax.config.role_table import CRITIC, POLICY, REFERENCE, TEACHER, Role
from pat_jax.rl.algorithm.losses import LOGPROBS, Loss
from pat_jax.rl.algorithm.update import Update
from pat_jax.rl.algorithm.value_loss import ValueLoss
from pat_jax.rl.batches.packing import Shape
from pat_jax.rl.batches.train_batch import COLUMNS
from pat_jax.training.build import check_experts, optimizer_of, policy_loss
from pat_jax.training.drafter_state import DrafterState
from pat_jax.training.own_loss import own_loss
from pat_jax.training.role_model import RoleModel
from pat_jax.training.roles import Roles
from pat_jax.training.trainable_params import TrainableParams
from pat_jax.training.trainer import OLD, Trainer
from pat_jax.training.transfer import Receivers


@dataclass(frozen=True)
class Losses:
    """The losses that the trained models minimize."""

    policy: Loss
    supervised: Loss | None = None  # the policy's in a supervised stage before RL
    critic: Loss | None = None


def build_roles(
    models: Sequence[RoleModel],
    losses: Losses,
    shapes: Sequence[Shape],
    receivers: Receivers,
    *,
    rests: bool = False,
    others: Sequence[Any] = (),
    beside: DrafterState | None = None,
) -> Roles:
    """Returns trainers and readers: of the policy, and of the models that read its micro-batches.

    Args:
      receivers: the rollouts that receive the policy's weights.
      shapes: shapes of the micro-batches; empty if the run learns nothing and compiles no passes.
      rests: whether models wait in the host's memory while no stage needs them.
      others: shapes and shardings of other arrays that stay on the devices, as of reward models.
      beside: arrays that a drafter keeps on the devices.

    Raises:
      UserError: a model cannot have the adapters that the options ask for, or `--experts` is set
        but no trained model has experts.
    """
    found = {model.role.name: model for model in models}
    policy = found[POLICY]
    critic = found.get(CRITIC)
    trained = [model.policy for model in models if model.role.trained]
    check_experts(policy.role.compute.experts, trained)
    held = policy.held()
    update = policy.update(losses.policy)
    before = losses.supervised and _supervised(policy, update, losses.supervised)
    trainer = _trainer(
        policy, held, update, receivers, shapes, rests=rests, supervised=before, beside=beside
    )
    of_values = None
    if critic and losses.critic:
        # A critic that begins as a copy of the policy shares the frozen base under the adapters.
        shares = not critic.role.source and critic.lora is not None and held.lora is not None
        own = critic.held(shares_base=shares)
        learned = critic.update(losses.critic)
        to_none = Receivers(critic.dtype)
        of_values = _trainer(critic, own, learned, to_none, shapes, rests=rests)
    readers = {
        # With adapters, the reference shares the policy's base; its adapters are a copy of its own.
        name: model.reader(
            shapes, held if name == REFERENCE and held.lora else model.held(), rests=rests
        )
        for name, model in found.items()
        if not model.role.trained
    }
    roles = Roles(trainer, readers, of_values, others, shapes, found)
    frozen = [*others, *(tree for reader in readers.values() for tree in reader.resident)]
    for one in roles.trained:
        kept = [tree for other in roles.trained if other is not one for tree in other.kept]
        one.others = on_devices([*frozen, *kept], one.layout.devices)
    return roles


def _trainer(
    model: RoleModel,
    held: TrainableParams,
    update: Update,
    receivers: Receivers,
    shapes: Sequence[Shape],
    *,
    rests: bool,
    supervised: Update | None = None,
    beside: DrafterState | None = None,
) -> Trainer:
    trained = model.role.trained
    assert trained
    return Trainer(
        held,
        update,
        receivers,
        micro_shapes=shapes,
        name=model.role.key,
        num_iterations=trained.num_iterations,
        supervised=supervised,
        predicts=model.role.is_read,
        is_offloaded=trained.optimization.optimizer.offload,
        rests=trained.waits if rests else "nothing",
        beside=beside,
    )


def _supervised(policy: RoleModel, update: Update, loss: Loss) -> Update | None:
    """Returns the update of the supervised stage; None if there is no such stage."""
    trained = policy.role.trained
    if trained is None or trained.supervised is None:
        return None
    return replace(
        update,
        predictor=replace(update.predictor, temperature=1.0),
        optimizer=optimizer_of(trained.supervised),
        loss=loss,
        is_mean=True,
    )


def losses_of(roles: Sequence[Role], algorithm: AlgorithmConfig, *, is_on_policy: bool) -> Losses:
    """Returns the losses of reinforcement learning.

    Args:
      is_on_policy: whether an iteration has one optimizer step.
    """
    found = {role.name: role for role in roles}
    teacher = found.get(TEACHER)
    top_k = teacher.top_k if teacher else 0
    by_options = policy_loss(algorithm, is_on_policy=is_on_policy, teacher_top_k=top_k)
    is_read = {
        "reference_logprobs": REFERENCE in found,
        "teacher_logprobs": teacher is not None and not top_k,
        "returns": algorithm.has_critic,
        "old_values": algorithm.has_critic,
    }
    columns = [*COLUMNS, OLD[LOGPROBS], *(name for name in is_read if is_read[name])]
    # Demonstrations have advantage 1: at a ratio of 1 the gradient is that of the cross-entropy.
    # So if the loss above is on-policy and plain, the two updates differ only in the optimizer, and
    # the trainer compiles one set of passes. A ratio over whole responses would weight by length.
    cross_entropy = replace(
        by_options,
        ratio="token",
        beta=0.0,
        corrects_kl=False,
        entropy_coef=0.0,
        distill_coef=0.0,
        top_k=0,
        correction="none",
        is_on_policy=True,
    )
    of_policy = own_loss(algorithm, columns, top_k) if algorithm.loss else by_options
    return Losses(of_policy, cross_entropy, ValueLoss(algorithm.value_clip))
