"""Attention within rows of several sequences on a TPU: JAX's splash attention.

With a causal mask the kernel leaves out the upper triangle, by tables of the blocks that it looks
at; what a segment hides it computes and masks. Here the tables are made of the positions: they
leave out the blocks of other sequences as well, which are not even fetched.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jaxtyping import Array, Float, Int

from pat_jax.models.kernels.row_bounds import end_blocks, key_blocks, seen_keys
from pat_jax.models.rematerialization import ATTENTION

BLOCK = 512  # queries and keys of a block at most: with 2,048 they do not fit the vector memory
LANES = 128  # numbers of a row of a register


def attend_on_tpu(
    queries: Float[Array, "rows length kv_heads queries_per_kv head_dim"],
    keys: Float[Array, "rows kv_heads length head_dim"],
    values: Float[Array, "rows kv_heads length head_dim"],
    positions: Int[Array, "rows length"],
    *,
    interpret: bool = False,
) -> Float[Array, "rows length kv_heads queries_per_kv head_dim"]:
    """As `row_attention.attend_rows`."""
    rows, length, heads, group, dim = queries.shape
    size, num_blocks = _grid(length)
    whole = num_blocks * size

    def one_row(x: Array, axis: int) -> Array:
        """[heads, rows * whole, head_dim]: all rows one behind the other, by head."""
        filling = [(0, 0)] * x.ndim
        filling[axis], filling[-1] = (0, whole - length), (0, -dim % LANES)
        by_head = jnp.moveaxis(jnp.pad(x, filling), (0, axis), (-3, -2))
        return jnp.reshape(by_head, (-1, rows * whole, x.shape[-1] + filling[-1][1]))

    # What fills a row up are sequences of one token: position 0.
    positions = jnp.pad(positions, ((0, 0), (0, whole - length)))
    segments = jnp.cumsum(jnp.ravel(positions) == 0, dtype=jnp.int32)
    # The kernel does not scale the scores.
    scaled = queries * jnp.asarray(dim**-0.5, queries.dtype)
    kernel = _kernel(positions, size, heads * group, interpret)
    ids = splash.SegmentIds(segments, segments)
    # A batch of one: without it XLA:TPU lays the sums of exponentials out anew, 256 MiB of float32 with
    # 16,384 tokens and 32 heads.
    out = jax.vmap(lambda q, k, v: kernel(q, k, v, segment_ids=ids))(
        *(x[None] for x in (one_row(scaled, 1), one_row(keys, 2), one_row(values, 2)))
    )
    out = jnp.reshape(out, (heads, group, rows, whole, -1))[:, :, :, :length, :dim]
    return jnp.transpose(out, (2, 3, 0, 1, 4))


def _grid(length: int) -> tuple[int, int]:
    """Tokens of a block, whole registers of them, and blocks of a row."""
    num_blocks = -(-length // BLOCK)
    return -(-length // (num_blocks * LANES)) * LANES, num_blocks


def _kernel(
    positions: Int[Array, "rows length"], size: int, heads: int, interpret: bool
) -> Callable[..., Any]:
    """Splash attention for rows with these positions, one behind the other."""
    # Of one block: the mask's function is the same for all, and the tables are replaced.
    mask = splash.MultiHeadMask([splash.CausalMask((size, size))] * heads)
    sizes = splash.BlockSizes(
        block_q=size,
        block_kv=size,
        block_q_dkv=size,
        block_kv_dkv=size,
        block_q_dq=size,
        block_kv_dq=size,
    )
    kernel = splash.make_splash_mha_single_device(
        mask, block_sizes=sizes, residual_checkpoint_name=ATTENTION, interpret=interpret
    )
    by_query, by_key = _tables(positions, size)
    queries = jnp.arange(positions.size, dtype=jnp.int32)
    info = kernel.fwd_mask_info._replace(**by_query, q_sequence=queries)
    kernel.fwd_mask_info = kernel.dq_mask_info = info
    kernel.dkv_mask_info = info._replace(**by_key)
    return kernel


def _tables(
    positions: Int[Array, "rows length"], size: int
) -> tuple[dict[str, Array], dict[str, Array]]:
    """The blocks of keys that each block of queries looks at, and those of queries that look at each of
    keys: whether it does, and which block to fetch."""
    rows, num_blocks = positions.shape[0], positions.shape[1] // size
    seen_by = seen_keys(positions)
    start = key_blocks(seen_by, queries=size, keys=size).own[:, :, None]
    last = end_blocks(seen_by, queries=size, keys=size)[:, None] - 1
    block = jnp.arange(num_blocks, dtype=positions.dtype)
    query, key = block[None, :, None], block[None, None]
    seen = ((start <= key) & (key <= query)).astype(jnp.int8)
    # The block to fetch: where none is looked at, that which is there already or comes next.
    before = num_blocks * jnp.arange(rows, dtype=positions.dtype)[:, None, None]
    small = jnp.int8 if rows * num_blocks <= 128 else jnp.int16  # scalar memory is scarce
    of_queries = (before + jnp.clip(key, start, query)).astype(small)
    of_keys = (before + jnp.clip(query, key, last)).astype(small)

    def one_row(x: Array, axis: int) -> Array:
        """A kernel's grid is at most as wide as a row; its table counts blocks of all rows."""
        shape = [1, num_blocks, num_blocks]
        shape[axis] *= rows
        return jnp.reshape(jnp.moveaxis(x, 0, axis - 1), shape)

    return (
        {"data_next": one_row(of_queries, 1), "block_mask": one_row(seen, 1)},
        {"data_next": one_row(of_keys, 2), "block_mask": one_row(seen, 2)},
    )
