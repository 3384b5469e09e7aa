"""Packs whole texts, alone or in pairs, and marks the tokens of each that a loss reads."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Int

from pat_jax.rl.batches.packing import Shape, pack_rows
from pat_jax.rl.batches.train_batch import Place, TrainBatch, empty_micro_batch
from pat_jax.rl.data.examples import Example


def pack_texts(
    sets: Sequence[Sequence[Example]],
    micro_shapes: Sequence[Shape],
    *,
    at: Literal["token", "target"],
    weigh: Callable[[Example], float],
) -> TrainBatch:
    """Returns one mini-batch without columns. It has a `Place` for each text in turn, from the
    text's first to its last token in the loss. Raises ValueError if a set is longer than every row.

    Args:
      sets: sets of texts, equally many each; a set's texts follow each other in one row.
      micro_shapes: micro-batch shapes from `packing.shapes`.
      at: where the model's output for a token in the loss is read. "token": at its own position, as
        for a reward model. "target": at the position before, which predicts the token.
      weigh: function that returns the weight of each token in the loss of a text.
    """
    sizes = [sum(map(len, each)) for each in sets]
    packing = pack_rows(sizes, micro_shapes)
    micro_batches = [empty_micro_batch(shape, ()) for shape in packing.shapes]
    before = int(at == "target")
    places = []
    for each, spot in zip(sets, packing.spots, strict=True):
        micro = micro_batches[spot.micro]
        row = spot.row
        start = spot.start
        for i, text in enumerate(each):
            whole = slice(start, start + len(text))
            micro.tokens[row, whole] = text.tokens
            micro.positions[row, whole] = text.positions
            # No position predicts the first token of a text.
            read = start + np.flatnonzero(text.in_loss[before:])
            micro.responses[row, read] = len(each) * (spot.number - 1) + i + 1
            micro.weights[row, read] = weigh(text)
            first, last = (read[0], read[-1]) if len(read) else (start, start - 1)
            places.append(Place(0, spot.micro, row, slice(int(first), int(last) + 1), 0))
            start += len(text)
    slots = sum(micro.tokens.size for micro in micro_batches)
    return TrainBatch([micro_batches], sum(sizes) / max(1, slots), places)


def to_scored_batch(
    texts: Iterable[Int[np.ndarray, " _"]], micro_shapes: Sequence[Shape]
) -> TrainBatch:
    """Returns one mini-batch of texts, at least one token each, that a scalar head scores at their
    last token. `TrainBatch.by_response` returns the scores."""
    whole = [[Example(tokens, np.arange(len(tokens)) == len(tokens) - 1)] for tokens in texts]
    return pack_texts(whole, micro_shapes, at="token", weigh=lambda _: 0.0)
