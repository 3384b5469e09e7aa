"""Supervised learning: the cross-entropy of the tokens to generate, over packed rows.

Knows examples and losses. Does not know files or models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pat_jax.rl.algorithm.losses import ENTROPY, LOGPROBS, Columns, Loss, Reduction, Responses
from pat_jax.rl.batches.packing import Shape, pack_rows
from pat_jax.rl.batches.train_batch import TrainBatch, empty_micro_batch
from pat_jax.rl.data.examples import Example


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
    """Packs examples into one mini-batch; each token in the loss weighs 1 / (tokens in the loss).

    Args:
      examples: the examples; at least one of their tokens must be in the loss.
      micro_shapes: from `packing.shapes`.

    Raises:
      ValueError: an example is longer than every row.
    """
    packing = pack_rows([len(example) for example in examples], micro_shapes)
    micro_batches = [empty_micro_batch(shape, ()) for shape in packing.shapes]
    weight = 1 / num_learned(examples)
    for example, spot in zip(examples, packing.spots, strict=True):
        micro, row = micro_batches[spot.micro], spot.row
        whole = slice(spot.start, spot.start + len(example))
        targets = slice(whole.start, whole.stop - 1)
        in_loss = example.in_loss[1:]  # whether each position's target is
        micro.tokens[row, whole] = example.tokens
        micro.positions[row, whole] = example.positions
        micro.responses[row, targets] = np.where(in_loss, spot.number, 0)
        micro.weights[row, targets] = np.where(in_loss, weight, 0)
    slots = sum(micro.tokens.size for micro in micro_batches)
    return TrainBatch([micro_batches], sum(map(len, examples)) / slots)


def num_learned(examples: Sequence[Example]) -> int:
    """Returns the number of tokens in the loss."""
    return sum(int(example.in_loss.sum()) for example in examples)


def cross_entropy(batch: TrainBatch, column: str) -> float:
    """Returns -Σ weights * log π(token) in nats over a batch, whose `column` has log π."""
    micro_batches = [micro for mini in batch.mini_batches for micro in mini]
    return -sum(
        float((np.asarray(micro.columns[column], np.float64) * micro.weights).sum())
        for micro in micro_batches
    )
