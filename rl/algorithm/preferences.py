"""Preference pairs in packed rows, and how well rewards agree with them, on the host.

The two texts of a pair lie behind each other in one row, where a loss finds both (`pair_loss.py`).
Responses 2n - 1 (chosen) and 2n (rejected) of a row are its n-th pair. Knows pairs, positions and
rewards. Does not know files or models.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float

from pat_jax.rl.batches.packing import Shape, pack_rows
from pat_jax.rl.batches.train_batch import MicroBatch, Place, TrainBatch, empty_micro_batch
from pat_jax.rl.data.examples import Example, Pair

MARGIN = "margin"  # the column of margins, at each token in the loss


def to_pair_batch(
    pairs: Sequence[Pair], micro_shapes: Sequence[Shape], at: Literal["token", "target"]
) -> TrainBatch:
    """Packs pairs into one mini-batch, in which each pair weighs the same.

    Each token in the loss weighs 1 / (texts * tokens in the loss of its text). Both texts of a pair
    weigh the same. So a loss with the same value at all tokens of a pair is the mean over pairs.

    Args:
      pairs: at least one.
      micro_shapes: from `packing.shapes`; the longest row holds the longest pair.
      at: where a token in the loss is read. "token": at its own position, whose hidden state has
        seen it, as of a reward model. "target": at the position before, which predicts it.

    Returns:
      The batch, with the column `margin`. Its places are those of the chosen and the rejected text
      of each pair in turn, each from the first to the last token in the loss.
    """
    packing = pack_rows([len(pair) for pair in pairs], micro_shapes)
    micro_batches = [empty_micro_batch(shape, (MARGIN,)) for shape in packing.shapes]
    places = []
    for pair, spot in zip(pairs, packing.spots, strict=True):
        micro, start = micro_batches[spot.micro], spot.start
        for i, example in enumerate((pair.chosen, pair.rejected)):
            number = 2 * spot.number - 1 + i
            read = _write(micro, example, (spot.row, start), number, 0 if at == "token" else 1)
            weight = 1 / (2 * len(pairs) * example.in_loss.sum())
            micro.weights[spot.row, read] = weight * (micro.responses[spot.row, read] > 0)
            micro.columns[MARGIN][spot.row, read] = pair.margin
            places.append(Place(0, spot.micro, spot.row, read, 0))
            start += len(example)
    slots = sum(micro.tokens.size for micro in micro_batches)
    return TrainBatch([micro_batches], sum(map(len, pairs)) / slots, places)


def _write(
    micro: MicroBatch, example: Example, begin: tuple[int, int], number: int, before: int
) -> slice:
    """Writes tokens and response; returns the positions of all that a loss reads of it."""
    row, start = begin
    whole = slice(start, start + len(example))
    micro.tokens[row, whole], micro.positions[row, whole] = example.tokens, example.positions
    (in_loss,) = np.nonzero(example.in_loss)
    micro.responses[row, start - before + in_loss] = number
    return slice(start - before + int(in_loss[0]), start - before + int(in_loss[-1]) + 1)


def sums_by_text(batch: TrainBatch, column: str) -> Float[np.ndarray, "pairs 2"]:
    """Returns the sum of a column over the tokens in the loss of each chosen and rejected text."""
    values, numbers = batch.by_response(column), _numbers(batch)
    sums = [
        np.sum(np.asarray(each, np.float64), where=number > 0)
        for each, number in zip(values, numbers, strict=True)
    ]
    return np.array(sums).reshape(-1, 2)


def _numbers(batch: TrainBatch) -> list[np.ndarray]:
    return [
        np.asarray(batch.mini_batches[at.mini][at.micro].responses)[at.row, at.targets]
        for at in batch.places
    ]


def agreement(
    rewards: Float[np.ndarray, "pairs 2"],
    *,
    margins: Float[np.ndarray, " pairs"] | float = 0.0,
    label_smoothing: float = 0.0,
) -> dict[str, float]:
    """Measures how well rewards agree with preferences.

        loss = mean of -(1 - ε) log σ(r_chosen - r_rejected - margin) - ε log σ(-(…))

    Args:
      rewards: of the chosen and the rejected text of each pair.
      margins: by how much the chosen one's is to be the larger.
      label_smoothing: ε.

    Returns:
      `loss` in nats. `accuracy` is the share of pairs whose chosen text has the larger reward; an
      equal one does not count. `margin` is the mean difference. `chosen_reward` and
      `rejected_reward` are means as well.
    """
    chosen, rejected = rewards[:, 0], rewards[:, 1]
    apart = chosen - rejected - margins
    losses = (1 - label_smoothing) * np.logaddexp(0, -apart)
    losses += label_smoothing * np.logaddexp(0, apart)
    return {
        "loss": float(losses.mean()),
        "accuracy": float(np.mean(chosen > rejected)),
        "margin": float(np.mean(chosen - rejected)),
        "chosen_reward": float(chosen.mean()),
        "rejected_reward": float(rejected.mean()),
    }
