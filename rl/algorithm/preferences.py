"""Packs preference pairs into rows, and measures how well rewards agree with preferences.

The two texts of a pair follow each other in a row, where a loss finds both (`pair_loss.py`).
Responses 2n - 1 (chosen) and 2n (rejected) of a row are its n-th pair. Knows pairs, positions and
rewards. Does not know files or models. Runs on the host.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float

from pat_jax.rl.batches.packing import Shape
from pat_jax.rl.batches.train_batch import TrainBatch
from pat_jax.rl.data.examples import Example, Pair, pack_texts

MARGIN = "margin"  # name of the column with a pair's margin at each token in the loss


def to_pair_batch(
    pairs: Sequence[Pair], micro_shapes: Sequence[Shape], at: Literal["token", "target"]
) -> TrainBatch:
    """Returns one mini-batch of packed pairs, at least one, with a column `margin` (`pack_texts`).

    Each token in the loss weighs 1 / (texts * tokens in the loss of its text). So both texts of a
    pair weigh the same, and a loss with the same value at all tokens of a pair is the mean over
    pairs.
    """

    def weigh(text: Example) -> float:
        return 1 / (2 * len(pairs) * text.in_loss.sum())

    both = [(pair.chosen, pair.rejected) for pair in pairs]
    batch = pack_texts(both, micro_shapes, at=at, weigh=weigh)
    margins = np.repeat([pair.margin for pair in pairs], 2)
    spans = [place.targets.stop - place.targets.start for place in batch.places]
    return batch.with_column(MARGIN, list(map(np.full, spans, margins)))


def sums_by_text(batch: TrainBatch, column: str) -> Float[np.ndarray, "pairs 2"]:
    """Returns the sum of a column over the tokens in the loss of each chosen and rejected text."""
    sums = []
    for at, values in zip(batch.places, batch.by_response(column), strict=True):
        numbers = np.asarray(batch.mini_batches[at.mini][at.micro].responses)[at.row, at.targets]
        sums.append(np.sum(np.asarray(values, np.float64), where=numbers > 0))
    return np.array(sums).reshape(-1, 2)


def agreement(
    rewards: Float[np.ndarray, "pairs 2"],
    *,
    margins: Float[np.ndarray, " pairs"] | float = 0.0,
    label_smoothing: float = 0.0,
) -> dict[str, float]:
    """Measures how well rewards agree with preferences.

        loss = mean of -(1 - ε) log σ(r_chosen - r_rejected - margin) - ε log σ(-(…))

    Args:
      rewards: rewards of the chosen and of the rejected text of each pair.
      margins: by how much the chosen text's reward should exceed the rejected one's.
      label_smoothing: ε.

    Returns:
      `loss` in nats. `accuracy` is the share of pairs whose chosen text has the larger reward; a
      pair of equal rewards counts a half, and NaN counts nothing. `margin` is the mean difference.
      `chosen_reward` and `rejected_reward` are means as well.
    """
    chosen, rejected = rewards[:, 0], rewards[:, 1]
    apart = chosen - rejected - margins
    losses = (1 - label_smoothing) * np.logaddexp(0, -apart)
    losses += label_smoothing * np.logaddexp(0, apart)
    return {
        "loss": float(losses.mean()),
        "accuracy": float(np.mean(np.nan_to_num(np.heaviside(chosen - rejected, 0.5)))),
        "margin": float(np.mean(chosen - rejected)),
        "chosen_reward": float(chosen.mean()),
        "rejected_reward": float(rejected.mean()),
    }
