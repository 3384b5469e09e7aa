"""Which blocks of keys a block of queries sees, in rows of several sequences.

Within a row the first key that a query sees never comes before that of the query ahead of it: so a
block's own ends say what all of it sees.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int


def first_keys(positions: Int[Array, "rows length"]) -> Int[Array, "rows length"]:
    """The first key that each query sees: that of its sequence."""
    return jnp.arange(positions.shape[1], dtype=positions.dtype)[None] - positions


def first_blocks(
    first: Int[Array, "rows length"], *, queries: int, keys: int
) -> Int[Array, "rows query_blocks"]:
    """Of each block of so many queries, the first block of so many keys that one of them sees.

    The last one has the last of the queries as a key.
    """
    return first[:, ::queries] // keys


def end_blocks(
    first: Int[Array, "rows length"], *, queries: int, keys: int
) -> Int[Array, "rows key_blocks"]:
    """Of each block of so many keys, the block of queries behind the last one that sees any of them.

    The first one has the first of the keys as a query.
    """
    ends = jnp.arange(keys, first.shape[1] + 1, keys, dtype=first.dtype)
    seeing = jnp.sum(first[:, None, :] < ends[None, :, None], axis=-1, dtype=first.dtype)
    return -(-seeing // queries)
