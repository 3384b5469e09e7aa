"""Supervised learning: the cross-entropy of the tokens to generate, over packed rows.

Knows examples and losses. Does not know files or models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pat_jax.rl.algorithm.losses import ENTROPY, LOGPROBS, Columns, Loss, Reduction, Responses
from pat_jax.rl.batches.packing import Shape
from pat_jax.rl.batches.train_batch import TrainBatch
from pat_jax.rl.data.examples import Example, pack_texts


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """-Σ weights * log π(token), maximum likelihood. The loss reads no column."""

    @property
    def metrics(self) -> Mapping[str, Reduction]:
        return {
            "loss": Reduction.SUM,
            "entropy": Reduction.MEAN,  # of the model's next-token distribution, nats
        }

    @property
    def needs(self) -> tuple[str, ...]:
        return ()

    def values(self, predicted: Columns, columns: Columns, responses: Responses) -> Columns:
        del columns, responses
        return {"loss": -predicted[LOGPROBS], "entropy": predicted[ENTROPY]}


def to_example_batch(examples: Sequence[Example], micro_shapes: Sequence[Shape]) -> TrainBatch:
    """Returns one mini-batch of packed examples (`pack_texts`). Each token in the loss weighs 1 /
    (tokens in the loss); there must be at least one."""
    weight = 1 / num_learned(examples)
    alone = [[example] for example in examples]
    return pack_texts(alone, micro_shapes, at="target", weigh=lambda _: weight)


def num_learned(examples: Sequence[Example]) -> int:
    """Returns the number of the examples' tokens that are in the loss."""
    return sum(int(example.in_loss.sum()) for example in examples)


def cross_entropy(batch: TrainBatch, column: str) -> float:
    """Returns -Σ weights * log π(token) in nats over a batch; its `column` has log π(token)."""
    micro_batches = [micro for mini in batch.mini_batches for micro in mini]
    return -sum(
        float((np.asarray(micro.columns[column], np.float64) * micro.weights).sum())
        for micro in micro_batches
    )
