"""Builds the models of a run that learns from files. Knows options, no data, checkpoints or
devices."""

from dataclasses import replace

from pat_jax.config.fine_tuning import FineTuning
from pat_jax.layout.buckets import ladder, largest_length
from pat_jax.layout.layout import Layout
from pat_jax.models.policy import Policy
from pat_jax.rl.algorithm.losses import Loss
from pat_jax.rl.algorithm.predict import Predictor
from pat_jax.rl.algorithm.update import Update
from pat_jax.rl.batches.packing import Shape, shapes
from pat_jax.training.build import (
    DTYPES,
    check_experts,
    functions_of,
    logit_tokens,
    optimizer_of,
    trained_of,
)
from pat_jax.training.reader import Reader
from pat_jax.training.roles import REFERENCE, Roles
from pat_jax.training.trainer import Trainer
from pat_jax.training.transfer import Receivers

SHORTEST_ROW = 64  # tokens


def build_supervised_roles(
    config: FineTuning,
    policy: Policy,
    layout: Layout,
    loss: Loss,
    micro_shapes: list[Shape],
    total_steps: int,
) -> Roles:
    """Returns the trainer in `layout`, and the frozen reference if the loss reads it.

    If the run evaluates, the trainer also computes predictions.

    Raises:
      UserError: the options ask for adapters that the model cannot have, or for a form of updates
        with experts, which it has not.
    """
    check_experts(config.experts, [policy])
    functions, tokens = functions_of(config.compute, policy, layout), logit_tokens(policy, layout)
    predictor = Predictor(functions, policy.config.vocab_size, logit_tokens=tokens)
    trained = trained_of(
        policy,
        layout,
        config.lora,
        compute_dtype=config.compute_dtype,
        weight_dtype=config.optimizer.weight_dtype,
    )
    dtype = DTYPES[config.compute_dtype]
    readers = {}
    if (column := f"{REFERENCE}_logprobs") in loss.needs:
        held = trained if trained.lora else replace(trained, weight_dtype=dtype)  # one base
        readers[REFERENCE] = Reader(column, held, predictor, micro_shapes)
    optimizer = optimizer_of(config.optimizer_in_use, total_steps)
    trainer = Trainer(
        trained,
        Update(predictor, optimizer, loss, config.router_aux_loss_coef),
        Receivers(dtype),
        micro_shapes=micro_shapes,
        predicts=config.eval.every > 0,
        others=[tree for reader in readers.values() for tree in reader.resident],
        is_offloaded=config.optimizer.offload,
    )
    return Roles(trainer, readers)


def row_shapes(config: FineTuning, num_shards: int, num_texts: int = 1) -> list[Shape]:
    """Returns the shapes of micro-batches.

    Args:
      num_texts: how many texts of `max_length` the longest row holds.
    """
    shortest = min(SHORTEST_ROW, config.max_length)
    whole = largest_length(num_texts * config.max_length, shortest)
    return shapes(ladder(shortest, whole), config.tokens_per_micro_batch, num_shards)
