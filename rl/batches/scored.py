"""Packs whole texts that a model with a scalar head scores, each at its last token."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from pat_jax.rl.batches.packing import Shape, pack_rows
from pat_jax.rl.batches.train_batch import Place, TrainBatch, empty_micro_batch


def to_scored_batch(
    texts: Sequence[Int[np.ndarray, " _"]], micro_shapes: Sequence[Shape]
) -> TrainBatch:
    """Returns one mini-batch in which each text is a response of one token, its last.

    What a model predicts there is `TrainBatch.by_response` of its column.

    Args:
      texts: tokens, at least one each.
      micro_shapes: from `packing.shapes`.

    Raises:
      ValueError: a text is longer than every row.
    """
    packing = pack_rows([len(tokens) for tokens in texts], micro_shapes)
    micro_batches = [empty_micro_batch(shape, ()) for shape in packing.shapes]
    places = []
    for tokens, spot in zip(texts, packing.spots, strict=True):
        micro, row, last = micro_batches[spot.micro], spot.row, spot.start + len(tokens) - 1
        micro.tokens[row, spot.start : last + 1] = tokens
        micro.positions[row, spot.start : last + 1] = np.arange(len(tokens))
        micro.responses[row, last] = spot.number
        places.append(Place(0, spot.micro, row, slice(last, last + 1), 0))
    num_slots = sum(micro.tokens.size for micro in micro_batches)
    return TrainBatch([micro_batches], sum(map(len, texts)) / max(1, num_slots), places)
