"""Scores whole texts with a frozen model that has a scalar head: a reward model."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from pat_jax.common.owners import is_absent, known_to_all
from pat_jax.common.timeline import stage
from pat_jax.planning.stage_names import SCORES, predictions
from pat_jax.rl.batches.packing import Shape, fills
from pat_jax.rl.data.packed_texts import to_scored_batch
from pat_jax.training.reader import Reader


class TextScorer:
    """Scores texts in batches of a few compiled shapes.

    Args:
      micro_shapes: number and length of the rows of the micro-batches that `reader` can read.
    """

    def __init__(self, reader: Reader, micro_shapes: Sequence[Shape]):
        self.reader = reader
        self._micro_shapes = micro_shapes

    def fills(self, lengths: Sequence[int]) -> bool:
        """Whether texts of these lengths fill whole micro-batches."""
        return fills(lengths, self._micro_shapes)

    def __call__(self, texts: Sequence[Int[np.ndarray, " _"]]) -> Float[np.ndarray, " texts"]:
        """Returns the score of each text: the model's number at its last token. Raises ValueError
        if a text is longer than every row."""
        devices = self.reader.devices
        found = np.zeros(0)
        if not is_absent(devices):
            batch = to_scored_batch(texts, self._micro_shapes)
            with stage(predictions(SCORES, "reward model"), devices):
                batch = self.reader.read(batch)
                found = np.concatenate(batch.by_response(self.reader.column))
        return known_to_all("scores", devices, found)
