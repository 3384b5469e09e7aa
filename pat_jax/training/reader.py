"""A frozen role: a model whose predictions others read, such as the reference policy."""

import os
from collections.abc import Sequence
from typing import Any

from pat_jax.common.devices import Device
from pat_jax.models.policy import Params
from pat_jax.programs.programs import Key, ProgramTable
from pat_jax.rl.algorithm.predict import Predictor
from pat_jax.rl.batches.train_batch import TrainBatch
from pat_jax.training.predictions import Predictions
from pat_jax.training.rest import at_rest, copied_to, fetched, moved
from pat_jax.training.trainable_params import TrainableParams


class Reader:
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
          held: the model's parameters and their layout; nothing of it is trained. With adapters,
            `held.frozen` may be the base of another role.
          micro_shapes: rows and length of each micro-batch of the batches that it reads.
          rests: whether the parameters are in the host's memory while nothing is read. It may be
            set anew until there are parameters.
          top_k: number of likeliest tokens to read at each position, as `MicroBatch.teacher`; 0:
            read the column.
        """
        self.column, self.held, self.largest = column, held, micro_shapes[-1:]
        self.rests, self.programs, self.top_k = rests, ProgramTable(), top_k
        self._predictions = Predictions(self.programs, held, predictor, micro_shapes, top_k)
        self._params: Params | None = None

    @property
    def params(self) -> Params | None:
        """The parameters, on the devices or, if the model rests, in the host's memory; None before
        they are set."""
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
    def devices(self) -> frozenset[Device]:
        return self.held.layout.devices

    @property
    def resident(self) -> list[Any]:
        """Shapes with shardings of what stays on the devices."""
        return [] if self.rests else [self.abstract_params]

    @property
    def visiting(self) -> list[Any]:
        """Shapes with shardings of what is on the devices only while the reader reads."""
        return [self.abstract_params] if self.rests else []

    def to_compile(self, *, by_need: bool) -> list[Key]:
        """Returns the programs that `compile` would compile."""
        return [key for key in self.programs.missing() if self._is_due(key) or not by_need]

    def compile(self, *, by_need: bool) -> None:
        """Compiles the programs.

        Args:
          by_need: compile only the one of the largest micro-batch now, others at first use.
        """
        asked = self._is_due if by_need else lambda key: True
        self.programs.compile_all(threads=os.cpu_count() or 1, only=asked)

    def _is_due(self, key: Key) -> bool:
        return (key.rows, key.length) in self.largest

    def take(self, params: Params) -> None:
        """Copies these parameters, to the reader's dtype and shards."""
        self.params = copied_to(params, self.abstract_params)

    def read(self, batch: TrainBatch) -> TrainBatch:
        """Returns the batch with the reader's column, or with the likeliest tokens."""
        assert self._params is not None, f"{self.column}: parameters are not there"
        # Nothing changes them: the host keeps its copy, and nothing has to go back.
        with fetched(self._params, self.held.shardings) as here:
            return self._predictions.with_column(batch, self.column, here)
