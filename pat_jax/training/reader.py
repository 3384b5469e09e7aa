"""A frozen role: a model whose predictions other roles read, such as the reference policy.

A reward model is one, too, which scores whole texts.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from pat_jax.common.owners import is_absent, known_to_all
from pat_jax.common.timeline import stage
from pat_jax.models.policy import Params
from pat_jax.planning.stage_names import SCORES, predictions
from pat_jax.rl.algorithm.predict import Predictor
from pat_jax.rl.batches.packing import Shape, fills
from pat_jax.rl.batches.train_batch import TrainBatch
from pat_jax.rl.data.examples import to_scored_batch
from pat_jax.training.handle import Handle
from pat_jax.training.predictions import Predictions
from pat_jax.training.rest import at_rest, copied_to, fetched, moved
from pat_jax.training.trainable_params import TrainableParams


class Reader(Handle):
    """A frozen model with programs of its own. Its predictions become a column of a batch."""

    def __init__(
        self,
        column: str,
        held: TrainableParams,
        predictor: Predictor,
        micro_shapes: Sequence[tuple[int, int]],
        *,
        rests: bool = False,
        top_k: int = 0,
    ):
        """
        Args:
          column: name of the column, such as `reference_logprobs`.
          held: the model's parameters and their layout; none of them is trained. With adapters,
            `held.frozen` may be the base of another role.
          micro_shapes: number and length of the rows of each micro-batch that the model reads.
          rests: whether the parameters are in the host's memory while the model reads nothing.
            The attribute may change until the parameters are set.
          top_k: number of likeliest tokens to predict at each position, as `MicroBatch.teacher`;
            with 0, the model predicts the column.
        """
        super().__init__(held.layout, micro_shapes)
        self.column = column
        self.held = held
        self.rests = rests
        self.top_k = top_k
        self._predictions = Predictions(self.programs, held, predictor, micro_shapes, top_k)
        self._params: Params | None = None

    @property
    def params(self) -> Params | None:
        """The parameters, or None before they are set. They are on the devices or, if the model
        rests, in the host's memory."""
        return self._params

    @params.setter
    def params(self, params: Params) -> None:
        """Sets the parameters, given in the form of `abstract_params`. If the model rests, they are
        moved to the host's memory, and their buffers on the devices are freed."""
        self._params = moved(params, at_rest(self.held.shardings)) if self.rests else params

    @property
    def abstract_params(self) -> Params:
        """Shapes with shardings of the parameters."""
        return self.held.abstract

    @property
    def resident(self) -> list[Any]:
        """Shapes with shardings of the arrays that always stay on the devices."""
        return [] if self.rests else [self.abstract_params]

    @property
    def visiting(self) -> list[Any]:
        """Shapes with shardings of the arrays on the devices only while the reader reads."""
        return [self.abstract_params] if self.rests else []

    def take(self, params: Params) -> None:
        """Sets the parameters to a copy of these in the reader's dtype and shards."""
        self.params = copied_to(params, self.abstract_params)

    def read(self, batch: TrainBatch) -> TrainBatch:
        """Returns the batch with the reader's column, or with its `top_k` likeliest tokens."""
        assert self._params is not None, f"{self.column}: parameters are not there"
        # Parameters do not change here: the host keeps its copy, and none has to be copied back.
        with fetched(self._params, self.held.shardings) as here:
            return self._predictions.with_column(batch, self.column, here)


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
