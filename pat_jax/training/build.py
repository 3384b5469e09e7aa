"""The trainer that a configuration asks for.

Knows options. Does not know data, checkpoints or which devices there are.
"""

from collections.abc import Callable
from dataclasses import asdict, replace

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from pat_jax.common.rules import require
from pat_jax.config.learning import AlgorithmConfig, OptimizerConfig
from pat_jax.config.lora import LoraConfig
from pat_jax.config.run import RunConfig
from pat_jax.engine.layout.buckets import ladder, largest_length
from pat_jax.engine.layout.layout import Layout
from pat_jax.models.lora import ALL_LINEAR, Lora
from pat_jax.models.peft_adapter import read_adapter
from pat_jax.models.policy import Policy
from pat_jax.planning.types import Split
from pat_jax.rl.optimizer import make_optimizer, make_schedule
from pat_jax.rl.packing import shapes
from pat_jax.rl.policy_loss import PolicyLoss
from pat_jax.rl.update import PolicyUpdate
from pat_jax.training.trainer import Trainer, model_functions

LOGIT_BYTES = 2**28  # of float32 logits on a device at a time; its gradient's pass has a few such
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def build_trainer(
    config: RunConfig,
    policy: Policy,
    layout: Layout,
    rollout_layouts: dict[Split, Layout],
) -> Trainer:
    """The programs of the update in `layout`, and of the transfer to each of `rollout_layouts`.

    Raises:
      UserError: adapters are asked for that the model cannot have.
    """
    algorithm, dtype = config.algorithm, DTYPES[config.compute_dtype]
    is_warm = config.warm_start.steps > 0
    update, supervised = _updates(config, policy, layout)
    return Trainer(
        policy,
        layout,
        update,
        # A rollout-only run compiles no forward and backward passes.
        micro_shapes=micro_shapes(config, layout.split.dp) if config.train or is_warm else (),
        rollout_layouts=rollout_layouts,
        rollout_dtype=dtype,
        num_iterations=algorithm.num_iterations,
        supervised=supervised if is_warm else None,
        rollout_policy=policy.with_weights(config.rollout.weights),
        has_reference=algorithm.beta > 0,
        lora=build_lora(config.lora, policy),
        # The forward pass rounds to it anyway, so that nothing is lost and half the memory won.
        base_dtype=dtype,
    )


def build_lora(config: LoraConfig, policy: Policy) -> Lora | None:
    """The adapters that the options ask for; None: all of the policy is trained.

    Raises:
      UserError: a target matches no linear layer; or the adapter that is gone on from is of another
        model, or not as the options say.
    """
    if not config.is_on:
        return None
    if not config.adapter:
        alpha, targets = config.alpha or 2.0 * config.rank, config.targets or (ALL_LINEAR,)
        return Lora.of(policy, rank=config.rank, alpha=alpha, targets=targets)
    lora = read_adapter(config.adapter, policy)
    asked = config.targets and Lora.of(policy, rank=1, alpha=1, targets=config.targets).modules
    for name, value, is_kept, found in (
        ("rank", config.rank, config.rank in (0, lora.rank), lora.rank),
        ("alpha", config.alpha, config.alpha in (0, lora.alpha), lora.alpha),
        ("targets", " ".join(config.targets), asked in ((), lora.modules), " ".join(lora.kinds)),
    ):
        expected = f"{found}, as in the adapter {config.adapter!r}; leave the option out to take it"
        require(is_kept, f"lora.{name}", value, expected)
    return lora


def _updates(
    config: RunConfig, policy: Policy, layout: Layout
) -> tuple[PolicyUpdate, PolicyUpdate]:
    """Of the reinforcement stage, and of the supervised stage before."""
    algorithm, warm_start = config.algorithm, config.warm_start
    dtype = DTYPES[config.compute_dtype]
    loss = policy_loss(algorithm, is_on_policy=config.updates_per_step == 1)
    update = PolicyUpdate(
        model_functions(policy, layout, dtype, remat=config.remat),
        make_optimizer(total_steps=_num_updates(config), **asdict(config.optimizer)),
        policy.config.vocab_size,
        loss,
        temperature=config.rollout.temperature,
        logit_tokens=logit_tokens(policy, layout),
    )
    supervised = make_optimizer(
        learning_rate=warm_start.learning_rate,
        total_steps=warm_start.steps,
        schedule="cosine",
        warmup_steps=10,
        moment_dtype=config.optimizer.moment_dtype,  # both optimizers' states have one form
    )
    # The advantages of demonstrations are 1: at a ratio of 1 the gradient is that of the cross-entropy.
    # So where the loss above is on-policy and plain, the two updates are equal but for the optimizer,
    # and the trainer compiles one set of passes. A ratio of whole responses would weight tokens by
    # their number.
    cross_entropy = replace(
        loss,
        ratio="token",
        beta=0.0,
        entropy_coef=0.0,
        correction="none",
        is_on_policy=True,
    )
    return update, replace(update, optimizer=supervised, loss=cross_entropy, temperature=1.0)


def logit_tokens(policy: Policy, layout: Layout) -> int:
    """Tokens of one shard of rows whose logits exist at a time, split over its tensor parallelism."""
    return max(1, LOGIT_BYTES * layout.split.tp // (4 * policy.config.padded_vocab_size))


def learning_rates(config: RunConfig) -> Callable[[ArrayLike], Array | np.floating]:
    """The learning rate of each optimizer step of a run, counted from 0."""
    return schedule_of(config.optimizer, _num_updates(config))


def schedule_of(
    optimizer: OptimizerConfig, total_steps: int
) -> Callable[[ArrayLike], Array | np.floating]:
    """The learning rate of each of `total_steps` optimizer steps, counted from 0."""
    return make_schedule(
        learning_rate=optimizer.learning_rate,
        schedule=optimizer.schedule,
        warmup_steps=optimizer.warmup_steps,
        total_steps=total_steps,
    )


def _num_updates(config: RunConfig) -> int:
    return config.steps * config.updates_per_step


def policy_loss(algorithm: AlgorithmConfig, *, is_on_policy: bool) -> PolicyLoss:
    """The loss of an algorithm."""
    return PolicyLoss(
        ratio=algorithm.ratio,
        surrogate=algorithm.surrogate,
        epsilon=algorithm.epsilon,
        epsilon_high=algorithm.epsilon_high,
        delta=algorithm.delta,
        beta=algorithm.beta if algorithm.kl_in == "loss" else 0.0,
        kl_estimator=algorithm.kl_estimator,
        entropy_coef=algorithm.entropy_coef,
        correction=algorithm.rollout_correction,
        correction_cap=algorithm.rollout_correction_cap,
        is_on_policy=is_on_policy,
    )


def micro_shapes(config: RunConfig, num_shards: int) -> list[tuple[int, int]]:
    rollout = config.rollout
    longest = rollout.max_length
    whole = largest_length(longest, rollout.min_length)
    return shapes(
        ladder(rollout.min_length, whole), config.algorithm.tokens_per_micro_batch, num_shards
    )
