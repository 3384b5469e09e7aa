"""Builds the trainer of supervised fine-tuning. Knows options, no data, checkpoints or devices."""

import numpy as np

from pat_jax.config.sft import SftConfig
from pat_jax.layout.buckets import ladder, largest_length
from pat_jax.layout.layout import Layout
from pat_jax.models.policy import Policy
from pat_jax.rl.algorithm.predict import Predictor
from pat_jax.rl.algorithm.supervised import CrossEntropy
from pat_jax.rl.algorithm.update import TrainState, Update
from pat_jax.rl.batches.batches import TrainBatch
from pat_jax.rl.batches.packing import Shape, shapes
from pat_jax.training.build import DTYPES, functions_of, logit_tokens, optimizer_of, trained_of
from pat_jax.training.trainer import Trainer
from pat_jax.training.transfer import Receivers

SHORTEST_ROW = 64  # tokens


def build_supervised_trainer(
    config: SftConfig, policy: Policy, layout: Layout, total_steps: int
) -> Trainer:
    """Returns a trainer in `layout` whose loss is the cross-entropy.

    If the run evaluates, it also computes log-probabilities.

    Raises:
      UserError: the options ask for adapters that the model cannot have.
    """
    functions, tokens = functions_of(config, policy, layout), logit_tokens(policy, layout)
    update = Update(
        Predictor(functions, policy.config.vocab_size, logit_tokens=tokens),
        optimizer_of(config.optimizer_in_use, total_steps),
        CrossEntropy(),
        config.router_aux_loss_coef,
    )
    return Trainer(
        trained_of(config, policy, layout),
        update,
        Receivers(DTYPES[config.compute_dtype]),
        micro_shapes=row_shapes(config, layout.split.dp),
        predicts=config.eval.every > 0,
        is_offloaded=config.optimizer.offload,
    )


def row_shapes(config: SftConfig, num_shards: int) -> list[Shape]:
    """Returns the shapes of micro-batches; the longest rows hold an example of `max_length`."""
    shortest = min(SHORTEST_ROW, config.max_length)
    whole = largest_length(config.max_length, shortest)
    return shapes(ladder(shortest, whole), config.tokens_per_micro_batch, num_shards)


def cross_entropy(trainer: Trainer, state: TrainState, batch: TrainBatch) -> float:
    """Returns -Σ weights * log π(token) in nats over a batch, without an update."""
    scored = trainer.predict(state, batch)
    micro_batches = [micro for mini in scored.mini_batches for micro in mini]
    logprobs = (np.asarray(micro.columns[trainer.old], np.float64) for micro in micro_batches)
    return -sum(
        float((values * micro.weights).sum())
        for values, micro in zip(logprobs, micro_batches, strict=True)
    )
