"""The state that decode steps carry and switches move. What is not in `DecodeState` does not move.

Arrays have one entry per row. R is the row bucket, the number of rows of a replica that compiled
programs work on. The rows of replica g are g·R … (g + 1)·R - 1.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int16, UInt32

from pat_jax.common.pytree import pytree_dataclass
from pat_jax.engine.sequences.types import RowSampling, num_words
from pat_jax.layout.layout import Layout
from pat_jax.models.cache.paged_layer import KV_AXES
from pat_jax.models.config import ModelConfig
from pat_jax.models.experts import NOT_RECORDED, ROUTE_DTYPE
from pat_jax.planning.draft_counts import KINDS, MAX_RUN, DraftResult


@pytree_dataclass
class RowState:
    """The state of all rows, one sequence each: all that decoding needs besides the KV cache."""

    last_token: Int[Array, " rows"]  # the newest token, not yet in the cache
    position: Int[Array, " rows"]  # index of `last_token`; as many tokens are in the cache
    end: Int[Array, " rows"]  # prompt + response may not grow longer than this
    running: Bool[Array, " rows"]  # still generating; False in empty rows
    ignore_eos: Bool[Array, " rows"]  # generate up to `end` (forced lengths of a benchmark)
    key: UInt32[Array, "rows 2"]  # the sequence's key, see gumbel.position_keys
    sampling: RowSampling

    @classmethod
    def empty(cls, rows: int) -> "RowState":
        """Returns host arrays of unused rows, to fill in."""

        def full(dtype: type, value: float = 0, columns: tuple[int, ...] = ()) -> Any:
            return np.full((rows, *columns), value, dtype)

        return cls(
            last_token=full(np.int32),
            position=full(np.int32),
            end=full(np.int32),
            running=full(bool),
            ignore_eos=full(bool),
            key=full(np.uint32, columns=(2,)),
            sampling=RowSampling.empty(rows),
        )


class LayerPages(NamedTuple):
    """The pages of one layer, all replicas' pages concatenated."""

    keys: Float[Array, "pages kv_heads page_size head_dim"]
    values: Float[Array, "pages kv_heads page_size head_dim"]


Pool = tuple[LayerPages, ...]


class Runs(NamedTuple):
    """The run of each row after its last step. A run is text that a row copies over several steps
    from one match; it continues if the next match is long enough."""

    kind: Int[Array, " rows"]  # kind of the match that the run began with
    place: Int[Array, " rows"]  # number of accepted tokens of the run so far, if it continues
    matched: Int[Array, " rows"]  # least length of a match that continues the run; 0: it has ended

    @classmethod
    def none(cls, rows: int) -> "Runs":
        """Returns host arrays of runs that have ended."""
        zeros: Any = np.zeros((3, rows), np.int32)
        return cls(*zeros)


class Drafting(NamedTuple):
    """The texts that rows draft from. The host makes them for a burst, which passes them on to the
    next burst if that is dispatched behind it."""

    text: Int[Array, "rows columns"]  # see `device/ngram.py`
    runs: Runs  # see `device/token_batch.py`
    borders: Int[Array, "rows 2"]  # between the sources of a text, see `texts.Texts`


class ModelDrafting(NamedTuple):
    """The KV cache of a draft model, passed to a burst that is dispatched behind another."""

    pool: Pool
    tables: Int[Array, "rows width"]  # the pages of each row in the pool
    previous: Int[Array, " rows"]  # the token before each row's newest one


@pytree_dataclass
class DecodeState:
    rows: RowState
    seen: UInt32[Array, "rows 2 words"]  # see sampling.Seen
    pool: Pool
    # Passed from a burst to one that is dispatched behind it; otherwise the host sets them anew.
    tables: Int[Array, "rows width"]  # the pages of each row, see PagedLayer
    drawn: Int[Array, " replicas"]  # pages of the reserve that rows have taken
    drafting: Any = None  # the drafter's state: `Drafting`, `ModelDrafting` or None


@pytree_dataclass
class ReservedPages:
    """Pages of each replica that rows take in turn as they grow."""

    pages: Int[Array | np.ndarray, "replicas size"]  # rings: page n, counted from 0, is at n % size
    filled: Int[Array | np.ndarray, " replicas"]  # pages reserved so far, taken ones included


@pytree_dataclass
class Until:
    """When a burst ends: after `steps` decode steps, or when the fullest replica has `threshold`
    running rows. It also ends when a replica's reserve lacks pages up to the next test."""

    steps: Int[Array | np.integer, ""]
    threshold: Int[Array | np.integer, ""]
    # See `Acceptance.accept_prob`; None without copied drafts.
    accept_prob: Float[Array | np.ndarray, "2 kinds places"] | None = None


@pytree_dataclass
class BurstOutput:
    """The tokens generated in a burst: the first `emitted` entries of each row."""

    tokens: Int[Array | np.ndarray, "rows burst"]
    logprobs: Float[Array | np.ndarray, "rows burst"]
    # log-probabilities under softmax(logits / temperature) alone, see sampling.sample
    unfiltered: Float[Array | np.ndarray, "rows burst"]
    emitted: Int[Array | np.ndarray, " rows"]
    running: Bool[Array | np.ndarray, " rows"]  # rows still running
    steps: Int[Array | np.integer, ""]  # decode steps that the device ran
    top_tokens: Int[Array | np.ndarray, "rows burst top"]  # see sampling.likeliest
    top_logprobs: Float[Array | np.ndarray, "rows burst top"]
    pages: Int[Array | np.ndarray, "rows most"]  # pages that each row took, then NULL_PAGE
    running_steps: Int[Array | np.ndarray, " rows"]  # steps in which each row was running
    drafted: DraftResult  # counts of draft tokens in each replica
    runs: Runs  # the run of each row after its last step
    # For each generated token: the experts of each layer that computed the token before it.
    routed_experts: Int16[Array | np.ndarray, "rows burst layers k"]


def abstract_rows(layout: Layout, rows_per_replica: int) -> RowState:
    rows = RowState.empty(rows_per_replica * layout.split.dp)
    each = layout.sharding("batch")
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=each), rows)


def abstract_index(layout: Layout, rows_per_replica: int, *columns: int) -> Any:
    """Returns the shape of an integer array with one entry per row, or `columns` per row."""
    shape = (rows_per_replica * layout.split.dp, *columns)
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=layout.sharding("batch"))


def abstract_routes(layout: Layout, blocks: int, page_size: int, config: ModelConfig) -> Any:
    """Returns the shape of the recorded experts of the tokens in each replica's prefill blocks."""
    shape = (blocks * layout.split.dp, page_size, *config.routes_shape)
    return jax.ShapeDtypeStruct(shape, ROUTE_DTYPE, sharding=layout.sharding("batch"))


def no_routes(config: ModelConfig, *shape: int) -> np.ndarray:
    """Returns NOT_RECORDED for tokens of this shape, so that the routers choose their experts."""
    return np.full((*shape, *config.routes_shape), NOT_RECORDED, ROUTE_DTYPE)


def abstract_seen(config: ModelConfig, layout: Layout, rows_per_replica: int) -> Any:
    shape = seen_shape(config, rows_per_replica * layout.split.dp)
    return jax.ShapeDtypeStruct(shape, jnp.uint32, sharding=layout.sharding("batch"))


def abstract_accept_prob(layout: Layout) -> Any:
    return jax.ShapeDtypeStruct((2, KINDS, 1 + MAX_RUN), jnp.float32, sharding=layout.sharding())


def seen_shape(config: ModelConfig, rows: int) -> tuple[int, int, int]:
    return rows, 2, num_words(config.padded_vocab_size)


def abstract_pool(
    config: ModelConfig, layout: Layout, pages_per_replica: int, page_size: int, dtype: jnp.dtype
) -> Pool:
    shape = pages_per_replica * layout.split.dp, config.num_kv_heads, page_size, config.head_dim
    array: Any = jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding(*KV_AXES))
    return (LayerPages(array, array),) * config.num_layers
