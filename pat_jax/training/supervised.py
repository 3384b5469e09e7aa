"""Builds the models of a run that learns from files. Knows options, no data, checkpoints or
devices."""

from dataclasses import replace

from pat_jax.config.compute import Compute
from pat_jax.config.lora import LoraConfig
from pat_jax.config.optimizer import OptimizerConfig
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
    policy: Policy,
    layout: Layout,
    loss: Loss,
    micro_shapes: list[Shape],
    *,
    compute: Compute,
    optimizer: OptimizerConfig,
    total_steps: int,
    lora: LoraConfig,
    router_aux_loss_coef: float = 0.0,
    evaluates: bool = False,
) -> Roles:
    """Returns the trainer in `layout`, and the frozen reference if the loss reads it.

    Args:
      optimizer: with a learning rate.
      evaluates: whether the trainer also computes predictions.

    Raises:
      UserError: the options ask for adapters that the model cannot have, or for a form of updates
        with experts, which it has not.
    """
    check_experts(compute.experts, [policy])
    functions = functions_of(compute, policy, layout)
    tokens = logit_tokens(policy, layout)
    predictor = Predictor(functions, policy.config.vocab_size, logit_tokens=tokens)
    trained = trained_of(
        policy,
        layout,
        lora,
        compute_dtype=compute.dtype,
        weight_dtype=optimizer.weight_dtype,
    )
    dtype = DTYPES[compute.dtype]
    readers = {}
    if (column := f"{REFERENCE}_logprobs") in loss.needs:
        held = trained if trained.lora else replace(trained, weight_dtype=dtype)  # one base
        readers[REFERENCE] = Reader(column, held, predictor, micro_shapes)
    rule = optimizer_of(optimizer, total_steps)
    trainer = Trainer(
        trained,
        Update(predictor, rule, loss, router_aux_loss_coef),
        Receivers(dtype),
        micro_shapes=micro_shapes,
        predicts=evaluates,
        others=[tree for reader in readers.values() for tree in reader.resident],
        is_offloaded=optimizer.offload,
    )
    return Roles(trainer, readers)


def row_shapes(max_length: int, budget: int, num_shards: int, num_texts: int = 1) -> list[Shape]:
    """Returns the shapes of micro-batches.

    Args:
      max_length: the longest text's, in tokens.
      budget: most tokens of a micro-batch, on all devices together.
      num_texts: how many of the longest texts the longest row holds.
    """
    shortest = min(SHORTEST_ROW, max_length)
    whole = largest_length(num_texts * max_length, shortest)
    return shapes(ladder(shortest, whole), budget, num_shards)
