"""Which keys each query sees in packed rows, and which blocks of keys a block of queries sees.

A query sees two stretches of its row: its own sequence or branch, up to itself; and, if it is in a
branch, the beginning of its sequence. Within a row, neither stretch begins before that of an
earlier query. So the first query of a block bounds what the whole block sees.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


class Seen(NamedTuple):
    """The keys that each query sees: `first` … `shared` - 1, and from `own` to the query itself.

    `first` … `shared` - 1 is empty for queries that are not in a branch.
    """

    own: Int[Array, "rows length"]  # index of the first key of the query's branch, else sequence
    first: Int[Array, "rows length"]  # index of the first key of the query's sequence
    shared: Int[Array, "rows length"]  # index after the last key that its branch shares with others


def seen_keys(positions: Int[Array, "rows length"]) -> Seen:
    """Returns the keys that each query sees.

    Args:
      positions: 0 begins a sequence. Any other position p that is not the one before plus 1 begins
        a branch, which continues the sequence's first p tokens.
    """
    at = jnp.broadcast_to(
        jnp.arange(positions.shape[1], dtype=positions.dtype)[None], positions.shape
    )
    before = jnp.pad(positions[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    own = jax.lax.cummax(jnp.where(positions == before + 1, 0, at), axis=1)
    first = jax.lax.cummax(jnp.where(positions == 0, at, 0), axis=1)
    return Seen(own, first, first + positions - (at - own))


def is_seen(seen: Seen, query: Int[Array, "..."], key: Int[Array, "..."]) -> Array:
    """Whether `query` sees `key`, both given as indices in a row; arrays must have equal ndim."""
    begins = (key >= seen.own) | ((key >= seen.first) & (key < seen.shared))
    return begins & (key <= query)


class Blocks(NamedTuple):
    """The blocks of keys that each block of queries sees: `first` … `shared` - 1, and from `own` to
    the block that holds the last of these queries."""

    own: Int[Array, "rows query_blocks"]
    first: Int[Array, "rows query_blocks"]
    shared: Int[Array, "rows query_blocks"]


def key_blocks(seen: Seen, *, queries: int, keys: int) -> Blocks:
    """Returns the blocks of `keys` keys that each block of `queries` queries sees."""
    own, first, shared = (x[:, ::queries] for x in seen)
    # If another sequence begins in the block, the keys that its branches share come after `own`.
    return Blocks(own // keys, first // keys, jnp.minimum(-(-shared // keys), own // keys))


def end_blocks(seen: Seen, *, queries: int, keys: int) -> Int[Array, "rows key_blocks"]:
    """Returns, for each block of keys, 1 + the index of the last block of queries that sees it.

    The first block of queries that sees such a key holds the position of the block's first key.
    Every block of queries from there to the returned one sees some key of the block.
    """
    length = seen.own.shape[1]
    begin = jnp.arange(0, length - keys + 1, keys, dtype=seen.own.dtype)[None, :, None]
    query = jnp.arange(length, dtype=seen.own.dtype)[None, None]
    own, first, shared = (x[:, None, :] for x in seen)
    end = begin + keys
    sees = ((own < end) & (query >= begin)) | ((first < end) & (shared > begin))
    return -(-jnp.max(jnp.where(sees, query + 1, 0), axis=-1) // queries)
