"""Predictions of a model at each token of a batch, by programs compiled for its micro-batches.

Knows shapes of micro-batches. Does not know what the predictions are for.
"""

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
from jaxtyping import Array

from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Params
from pat_jax.programs.programs import Key, ProgramTable
from pat_jax.rl.algorithm.losses import PREDICTED
from pat_jax.rl.algorithm.predict import Predictor
from pat_jax.rl.batches.train_batch import MicroBatch, TopTokens, TrainBatch, with_no_routes
from pat_jax.training.passes import abstract_micro
from pat_jax.training.trainable_params import TrainableParams


class Predictions:
    """The compiled predictions of a model: log-probabilities, or the values of a scalar head."""

    def __init__(
        self,
        table: ProgramTable,
        trained: TrainableParams,
        predictor: Predictor,
        micro_shapes: Sequence[tuple[int, int]],
        teacher_top_k: int = 0,
    ):
        """Declares the programs `predict`, one for each micro-batch shape.

        Args:
          teacher_top_k: number of likeliest tokens to predict, as `MicroBatch.teacher`; with 0,
            the programs predict one number at each token.
        """
        self._table = table
        self._trained = trained
        self._top_k = teacher_top_k
        layout = trained.layout
        what = PREDICTED[trained.policy.config.head][0]

        def predict_step(frozen: Params, params: Params, micro: MicroBatch) -> Array | TopTokens:
            own = trained.over(frozen, predictor)
            if teacher_top_k:
                return own.top_step(params, micro, teacher_top_k)
            return own.predict_step(params, micro)[what]

        by_rows = layout.sharding("batch", role="train")
        for shape in micro_shapes:
            table.declare(
                Key("predict", layout.split, *shape),
                predict_step,
                trained.abstract_frozen,
                trained.abstract,
                abstract_micro(trained.policy, layout, shape, ()),
                # Each process gets the whole result, to read it and to give it to its devices.
                out_shardings=layout.sharding() if layout.spans_processes else by_rows,
            )

    def with_column(self, batch: TrainBatch, column: str, params: Params) -> TrainBatch:
        """Returns the batch with the predictions under `params` in `column`. Micro-batches that
        have this column keep it."""
        mini_batches = [
            [self._with_column(micro, column, params) for micro in mini]
            for mini in batch.mini_batches
        ]
        return replace(batch, mini_batches=mini_batches)

    def _with_column(self, micro: MicroBatch, column: str, params: Params) -> MicroBatch:
        if column in micro.columns or (self._top_k and micro.teacher is not None):
            return micro
        layout = self._trained.layout
        rows = with_routes_of(self._trained.policy.config, replace(micro, columns={}, teacher=None))
        program = self._table[Key("predict", layout.split, *micro.tokens.shape)]
        found = program(self._trained.frozen, params, rows)
        if self._top_k:
            # k times as large as a column: a whole iteration's would fill the devices.
            return replace(micro, teacher=jax.tree.map(np.asarray, found))
        if layout.spans_processes:
            found = np.asarray(found)
        return replace(micro, columns={**micro.columns, column: found})


def with_routes_of(config: ModelConfig, micro: MicroBatch) -> MicroBatch:
    """Returns the micro-batch with routes in the shape that a model's programs take.

    Models without experts take no routes. For other models, routes that are missing or belong to
    another model are marked as not recorded."""
    if config.experts is None:
        return replace(micro, routes=None)
    if micro.routes is not None and micro.routes.shape[2:] == config.routes_shape:
        return micro
    return with_no_routes(micro, config.routes_shape)
