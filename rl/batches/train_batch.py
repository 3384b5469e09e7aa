"""Arrays of a batch: micro-batches of fixed shapes, and the places of responses in them.

`batches.py` packs responses into them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int16

from pat_jax.common.pytree import pytree_dataclass
from pat_jax.rl.batches.packing import Shape

AnyArray = Any  # a NumPy array on the host, a JAX array inside a program


NOT_RECORDED = -1  # stands for an expert that is not recorded


# The columns that every batch has. Others are computed if a loss needs them (`Loss.needs`).
COLUMNS = ("advantages", "behavior_logprobs", "sampled_logprobs")


# The column of 1 / (sum of the mini-batch's weights), only for the aggregation "constant": the sum
# is 1 for the others.
SCALE = "weight_scale"


@pytree_dataclass
class TopTokens:
    """The k likeliest tokens of a model at each position."""

    ids: Int[AnyArray, "*position k"]
    logprobs: Float[AnyArray, "*position k"]  # nats, normalised over the whole vocabulary
    tail: Float[AnyArray, "*position"]  # log-probability of all other tokens together


@pytree_dataclass
class MicroBatch:
    """The arrays of one forward-backward pass. Empty rows and positions are 0 everywhere."""

    tokens: Int[AnyArray, "rows length"]  # prompt + response of each example in turn
    # Position of each token in its example, from 0. A jump begins another example: at 0 or, if it
    # shares a prefix that is already in the row, at the number of shared tokens.
    positions: Int[AnyArray, "rows length"]
    # Number in its row, from 1, of the response that the target belongs to; 0: no response.
    responses: Int[AnyArray, "rows length"]
    weights: Float[AnyArray, "rows length"]  # the target's weight in the mini-batch's loss, or 0
    columns: dict[str, Float[AnyArray, "rows length"]]  # further inputs of a loss for the target
    # The experts that computed each token in the rollout, NOT_RECORDED if unknown; None if the
    # model has no experts, or nothing is recorded.
    routes: Int16[AnyArray, "rows length layers k"] | None = None
    teacher: TopTokens | None = None  # a teacher's likeliest tokens, if the loss reads them

    @property
    def mask(self) -> Bool[AnyArray, "rows length"]:
        """Whether the target is a token of a response."""
        return self.responses > 0

    @property
    def targets(self) -> Int[Array, "rows length"]:
        return next_tokens(self.tokens)


@dataclass(frozen=True)
class TrainBatch:
    mini_batches: Sequence[Sequence[MicroBatch]]  # each for one optimizer step, in order
    padding_efficiency: float  # real tokens / (rows * length) over all micro-batches
    places: Sequence["Place"] = ()  # place of each response, group by group

    @property
    def shared(self) -> Int[np.ndarray, " responses"]:
        """Number of tokens of each response's prompt that an earlier response put into the row."""
        return np.array([at.shared for at in self.places], np.int64)

    def on_host(self) -> "TrainBatch":
        """Returns the batch with all columns in the host's memory."""

        def read(micro: MicroBatch) -> MicroBatch:
            return replace(micro, columns={k: np.asarray(v) for k, v in micro.columns.items()})

        return replace(self, mini_batches=[list(map(read, mini)) for mini in self.mini_batches])

    def by_response(self, column: str) -> list[Float[np.ndarray, " _"]]:
        """Returns a column's values at the tokens of each response, group by group."""
        host = [[np.asarray(micro.columns[column]) for micro in mini] for mini in self.mini_batches]
        return [host[at.mini][at.micro][at.row, at.targets] for at in self.places]

    def with_column(self, column: str, values: Sequence[Float[np.ndarray, " _"]]) -> "TrainBatch":
        """Returns the batch with a new column of these values, ordered as by `by_response`."""

        def with_zeros(micro: MicroBatch) -> MicroBatch:
            zeros = np.zeros(micro.tokens.shape, np.float32)
            return replace(micro, columns={**micro.columns, column: zeros})

        minis = [list(map(with_zeros, mini)) for mini in self.mini_batches]
        for at, each in zip(self.places, values, strict=True):
            minis[at.mini][at.micro].columns[column][at.row, at.targets] = each
        return replace(self, mini_batches=minis)


class Place(NamedTuple):
    """The place of a response in a batch."""

    mini: int  # index of the mini-batch
    micro: int  # index of the micro-batch in the mini-batch
    row: int
    targets: slice  # positions in the row that predict the response's tokens
    shared: int  # number of tokens of its prompt that an earlier response has put into the row


def next_tokens(tokens: Int[Array, "rows length"]) -> Int[Array, "rows length"]:
    """Returns the token that each position predicts: `tokens` moved left by one, then 0."""
    return jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))


def abstract_micro_batch(
    shape: Shape, columns: Iterable[str], teacher_top_k: int = 0
) -> MicroBatch:
    """Returns a micro-batch of `jax.ShapeDtypeStruct` with these columns, to lower programs."""

    def per_token(dtype: type, *more: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*shape, *more), dtype)

    ids = per_token(np.int32, teacher_top_k)
    logprobs = per_token(np.float32, teacher_top_k)
    return MicroBatch(
        tokens=per_token(np.int32),
        positions=per_token(np.int32),
        responses=per_token(np.int32),
        weights=per_token(np.float32),
        columns={name: per_token(np.float32) for name in columns},
        teacher=TopTokens(ids, logprobs, per_token(np.float32)) if teacher_top_k else None,
    )


def empty_micro_batch(shape: Shape, columns: Iterable[str]) -> MicroBatch:
    """Returns a micro-batch of zeros on the host, to be written to."""
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract_micro_batch(shape, columns))


def with_no_routes(micro: MicroBatch, shape: tuple[int, ...]) -> MicroBatch:
    """Returns the micro-batch with routes of `shape` per token, none of which is recorded."""
    routes = np.full((*micro.tokens.shape, *shape), NOT_RECORDED, np.int16)
    return replace(micro, routes=routes)
