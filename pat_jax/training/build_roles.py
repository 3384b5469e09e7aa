"""Builds the models of a run that a configuration asks for: what each is, and what it does.

Knows options and roles. Does not know data, checkpoints or which devices there are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from pat_jax.common.pytree import on_devices
from pat_jax.config.run import RunConfig
from pat_jax.engine.device.draft.drafter import Drafter
from pat_jax.engine.device.draft.drafters import NO_DRAFTER
from pat_jax.layout.layout import Layout
from pat_jax.models.lora import Lora
from pat_jax.models.policy import Policy
from pat_jax.planning.types import Split
from pat_jax.rl.algorithm.losses import LOGPROBS
from pat_jax.rl.algorithm.optimizer import make_optimizer
from pat_jax.rl.algorithm.update import Update
from pat_jax.rl.algorithm.value_loss import ValueLoss
from pat_jax.rl.batches.packing import Shape
from pat_jax.rl.batches.train_batch import COLUMNS
from pat_jax.training.build import (
    DTYPES,
    check_experts,
    micro_shapes,
    new_adapters,
    optimizer_of,
    policy_loss,
    predictor_of,
    rollout_policy,
    trained_of,
)
from pat_jax.training.carrier import Carrier
from pat_jax.training.drafter_state import drafter_state
from pat_jax.training.own_loss import own_loss
from pat_jax.training.reader import Reader
from pat_jax.training.roles import REFERENCE, Roles
from pat_jax.training.trainable_params import TrainableParams
from pat_jax.training.trainer import CRITIC, OLD, Trainer
from pat_jax.training.transfer import Receivers

NO_READERS: Mapping[str, Reader] = MappingProxyType({})
NO_CARRIERS: Mapping[Split, Carrier] = MappingProxyType({})


@dataclass(frozen=True)
class CriticModel:
    """The critic's model, layout and source: what is known before its weights are loaded."""

    policy: Policy  # a model with a scalar head
    layout: Layout
    source: str = ""  # a directory, or a name on the Hub; empty: it begins as the policy

    @property
    def begins_as_policy(self) -> bool:
        return not self.source

    def lora(self, config: RunConfig) -> Lora | None:
        """Returns the critic's adapters; None if the whole critic is trained.

        Raises:
          UserError: a target matches no linear layer.
        """
        asked = config.critic.lora
        return new_adapters(asked, self.policy) if asked.is_on else None


def build_roles(
    config: RunConfig,
    policy: Policy,
    layout: Layout,
    rollout_layouts: dict[Split, Layout],
    drafter: Drafter = NO_DRAFTER,
    teacher: Mapping[str, Reader] = NO_READERS,
    others: Sequence[Any] = (),
    critic: CriticModel | None = None,
    reference: Layout | None = None,
    carriers: Mapping[Split, Carrier] = NO_CARRIERS,
    row_shards: int = 0,
) -> Roles:
    """Returns the models of a run in `layout`, the policy with transfers to `rollout_layouts`.

    Args:
      carriers: of transfers to rollouts on other devices (`Receivers.carriers`).
      reference: the reference's layout; None: the policy's.
      row_shards: the number that divides the rows of each micro-batch; 0: the policy's replicas.
      critic: what the critic is, if the algorithm has one.
      drafter: the rollouts' drafter; its arrays stay on the devices during updates.
      teacher: a frozen role of another model, by its name.
      others: shapes with shardings of what else stays on the devices, such as reward models.

    Raises:
      UserError: the options ask for adapters that the model cannot have, or for a form of updates
        with experts, which no trained model has.
    """
    check_experts(config.experts, [policy, *([critic.policy] if critic else [])])
    algorithm, dtype = config.algorithm, DTYPES[config.compute_dtype]
    is_warm = config.warm_start.steps > 0
    trained = trained_of(
        policy,
        layout,
        config.lora,
        compute_dtype=config.compute_dtype,
        weight_dtype=config.optimizer.weight_dtype,
    )
    shapes = micro_shapes(config.micro_batches, row_shards or layout.split.dp, layout.platform)
    readers = {**_readers(config, trained, reference or layout, shapes), **teacher}
    of_values = critic and _critic(config, critic, shapes)
    beside = [*others, *(tree for reader in readers.values() for tree in reader.resident)]
    update, supervised = _updates(config, policy, layout)
    learns, embed = config.train or is_warm, policy.config.embed_dim
    kept = rollout_policy(policy, config.rollout.weights, trained.lora)
    trainer = Trainer(
        trained,
        update,
        Receivers(dtype, rollout_layouts, kept, carriers),
        # A rollout-only run compiles no forward and backward passes.
        micro_shapes=shapes if learns else (),
        num_iterations=algorithm.num_iterations,
        supervised=supervised if is_warm else None,
        # KL in the reward, and a teacher of sampled tokens, compare the policy before the update
        # with another.
        predicts=algorithm.penalizes_kl or (bool(teacher) and not config.teacher.top_k),
        others=_near(layout, [*beside, *(of_values.kept if of_values else ())]),
        is_offloaded=config.optimizer.offload,
        rests="moments" if config.roles.rest == "host" else "nothing",
        beside=drafter_state(drafter, layout, embed, dtype, learns=config.train),
    )
    if of_values:
        of_values.others = _near(of_values.layout, [*beside, *trainer.kept])
    own = [layout, *([of_values.layout] if of_values else [])]
    own += [reader.held.layout for reader in readers.values()]
    are_apart = len({each.devices for each in own}) > 1
    return Roles(trainer, readers, of_values, others, shapes, are_apart=are_apart)


def _near(layout: Layout, trees: Any) -> list[Any]:
    """Returns what of these trees is on the layout's devices."""
    return on_devices(trees, layout.devices)


def _critic(config: RunConfig, model: CriticModel, shapes: Sequence[Shape]) -> Trainer:
    """Returns the trainer of the critic, which is sent to no rollout."""
    policy, layout, dtype = model.policy, model.layout, DTYPES[config.compute_dtype]
    update = Update(
        predictor_of(config.compute, policy, layout),
        optimizer_of(config.critic_optimizer, config.critic_updates),
        ValueLoss(config.algorithm.value_clip),
    )
    lora = model.lora(config)
    trained = TrainableParams(
        policy,
        layout,
        lora,
        compute_dtype=dtype,
        weight_dtype=DTYPES[config.optimizer.weight_dtype],
        shares_base=lora is not None and model.begins_as_policy and config.lora.is_on,
    )
    return Trainer(
        trained,
        update,
        Receivers(dtype),
        micro_shapes=shapes if config.train else (),
        name=CRITIC,
        num_iterations=config.algorithm.num_iterations,
        is_offloaded=config.optimizer.offload,
        rests="state" if config.roles.rest == "host" else "nothing",
    )


def _readers(
    config: RunConfig, trained: TrainableParams, layout: Layout, shapes: Sequence[Shape]
) -> dict[str, Reader]:
    """Returns the frozen roles that the algorithm reads, by name.

    Parameters of the reference are in the compute dtype, to which the forward pass rounds anyway.
    With adapters it has the policy's base, and adapters of its own.
    """
    if not config.algorithm.beta:
        return {}
    policy, dtype = trained.policy, DTYPES[config.compute_dtype]
    whole = TrainableParams(policy, layout, weight_dtype=dtype)
    held = trained if trained.lora else whole
    shapes = shapes if config.learns else ()
    temperature = config.rollout.temperature
    predictor = predictor_of(config.compute, policy, layout, temperature=temperature)
    rests = config.roles.rest == "host"
    return {REFERENCE: Reader("reference_logprobs", held, predictor, shapes, rests=rests)}


def _updates(config: RunConfig, policy: Policy, layout: Layout) -> tuple[Update, Update]:
    """Returns the updates of the reinforcement stage and of the supervised stage before it."""
    algorithm, warm_start = config.algorithm, config.warm_start
    is_on_policy, top_k = config.updates_per_step == 1, config.teacher.top_k
    by_options = policy_loss(algorithm, is_on_policy=is_on_policy, teacher_top_k=top_k)
    update = Update(
        predictor_of(
            config.compute,
            policy,
            layout,
            temperature=config.rollout.temperature,
            router_replay=algorithm.router_replay,
        ),
        optimizer_of(config.optimizer_in_use, config.policy_updates),
        own_loss(algorithm, _columns(config), top_k) if algorithm.loss else by_options,
        algorithm.router_aux_loss_coef,
        is_mean=algorithm.loss_aggregation != "constant" or not algorithm.router_aux_loss_coef,
    )
    supervised = make_optimizer(
        learning_rate=warm_start.learning_rate,
        total_steps=warm_start.steps,
        schedule="cosine",
        warmup_steps=10,
        moment_dtype=config.optimizer.moment_dtype,  # both optimizers' states have one form
    )
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
    predictor = replace(update.predictor, temperature=1.0)
    changed = {"optimizer": supervised, "loss": cross_entropy, "is_mean": True}
    return update, replace(update, predictor=predictor, **changed)


def _columns(config: RunConfig) -> list[str]:
    """Returns the names of the columns that a loss of the policy can read in this run."""
    is_read = {
        "reference_logprobs": config.algorithm.beta > 0,
        "teacher_logprobs": bool(config.teacher.model) and not config.teacher.top_k,
        "returns": config.algorithm.has_critic,
        "old_values": config.algorithm.has_critic,
    }
    return [*COLUMNS, OLD[LOGPROBS], *(name for name in is_read if is_read[name])]
