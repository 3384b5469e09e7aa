"""The trainer that a configuration asks for.

Knows options. Does not know data, checkpoints or which devices there are.
"""

from dataclasses import asdict

import jax.numpy as jnp

from pat_jax.config.run import RunConfig
from pat_jax.engine.layout.buckets import ladder, largest_length
from pat_jax.engine.layout.layout import Layout
from pat_jax.models.policy import Policy
from pat_jax.planning.types import Split
from pat_jax.rl.batches import shapes
from pat_jax.rl.update import PolicyUpdate, make_optimizer
from pat_jax.training.trainer import Trainer, model_functions

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def build_trainer(
    config: RunConfig,
    policy: Policy,
    layout: Layout,
    rollout_layouts: dict[Split, Layout],
) -> Trainer:
    """The programs of the update in `layout`, and of the transfer to each of `rollout_layouts`."""
    algorithm, rollout, dtype = config.algorithm, config.rollout, DTYPES[config.compute_dtype]
    forward, logits = model_functions(policy, layout, dtype, remat=config.remat)

    def functions(optimizer) -> PolicyUpdate:
        return PolicyUpdate(
            forward,
            logits,
            optimizer,
            policy.config.vocab_size,
            temperature=rollout.temperature,
            epsilon=algorithm.epsilon,
            epsilon_high=algorithm.epsilon_high,
            dual_clip=algorithm.dual_clip,
            beta=algorithm.beta,
        )

    update = functions(
        make_optimizer(
            total_steps=config.steps * config.updates_per_step, **asdict(config.optimizer)
        )
    )
    warm_start = config.warm_start
    supervised = make_optimizer(
        learning_rate=warm_start.learning_rate,
        total_steps=warm_start.steps,
        schedule="cosine",
        warmup_steps=10,
    )
    return Trainer(
        policy,
        layout,
        update,
        # A rollout-only run compiles no forward and backward passes.
        micro_shapes=micro_shapes(config, layout.split.dp)
        if config.train or warm_start.steps
        else (),
        rollout_layouts=rollout_layouts,
        rollout_dtype=dtype,
        is_on_policy=config.updates_per_step == 1,
        num_iterations=algorithm.num_iterations,
        supervised=functions(supervised) if warm_start.steps else None,
        rollout_policy=policy.with_weights(config.rollout.weights),
    )


def micro_shapes(config: RunConfig, num_shards: int) -> list[tuple[int, int]]:
    rollout = config.rollout
    longest = rollout.max_prompt_length + rollout.max_completion_length
    whole = largest_length(longest, rollout.min_length)
    return shapes(
        ladder(rollout.min_length, whole), config.algorithm.tokens_per_micro_batch, num_shards
    )
