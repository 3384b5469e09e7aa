"""Attention within packed rows on a TPU, by JAX's splash attention.

With a causal mask the kernel skips the upper triangle by tables of the blocks to visit; blocks of
other segments are computed and masked. Here the tables are made from the positions, so that blocks
of other sequences are neither computed nor fetched.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jaxtyping import Array, Float, Int

from pat_jax.models.kernels.row_bounds import end_blocks, key_blocks, seen_keys
from pat_jax.models.rematerialization import ATTENTION

BLOCK = 512  # most queries and keys of a block: 2,048 do not fit the vector memory
LANES = 128  # values in a row of a register


def attend_on_tpu(
    queries: Float[Array, "rows length kv_heads queries_per_kv head_dim"],
    keys: Float[Array, "rows kv_heads length head_dim"],
    values: Float[Array, "rows kv_heads length head_dim"],
    positions: Int[Array, "rows length"],
    *,
    interpret: bool = False,
) -> Float[Array, "rows length kv_heads queries_per_kv head_dim"]:
    """Implements `row_attention.attend_rows` on a TPU. Rows must not contain branches."""
    rows, length, heads, group, dim = queries.shape
    size, num_blocks = _grid(length)
    whole = num_blocks * size

    def one_row(x: Array, axis: int) -> Array:
        """Returns all padded rows joined to one: [heads, rows * whole, head_dim]."""
        filling = [(0, 0)] * x.ndim
        filling[axis] = (0, whole - length)
        filling[-1] = (0, -dim % LANES)
        by_head = jnp.moveaxis(jnp.pad(x, filling), (0, axis), (-3, -2))
        return jnp.reshape(by_head, (-1, rows * whole, x.shape[-1] + filling[-1][1]))

    # Padding tokens are sequences of one token: position 0.
    positions = jnp.pad(positions, ((0, 0), (0, whole - length)))
    segments = jnp.cumsum(jnp.ravel(positions) == 0, dtype=jnp.int32)
    # The kernel does not scale the scores.
    scaled = queries * jnp.asarray(dim**-0.5, queries.dtype)
    kernel = _kernel(positions, size, heads * group, interpret)
    ids = splash.SegmentIds(segments, segments)
    # A batch of one: without it XLA:TPU changes the layout of the sums of exponentials, 256 MiB of
    # float32 with 16,384 tokens and 32 heads.
    out = jax.vmap(lambda q, k, v: kernel(q, k, v, segment_ids=ids))(
        *(x[None] for x in (one_row(scaled, 1), one_row(keys, 2), one_row(values, 2)))
    )
    out = jnp.reshape(out, (heads, group, rows, whole, -1))[:, :, :, :length, :dim]
    return jnp.transpose(out, (2, 3, 0, 1, 4))


def _grid(length: int) -> tuple[int, int]:
    """Returns the number of tokens in a block, a multiple of LANES, and of blocks in a row."""
    num_blocks = -(-length // BLOCK)
    return -(-length // (num_blocks * LANES)) * LANES, num_blocks


def _kernel(
    positions: Int[Array, "rows length"], size: int, heads: int, interpret: bool
) -> Callable[..., Any]:
    """Returns splash attention for joined rows with these positions."""
    # A mask for one block: its function holds for all blocks, and the tables are replaced below.
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
    """Returns the kernels' tables, one by block of queries and one by block of keys. Each lists
    which blocks of the other kind to visit, and which block to fetch."""
    rows = positions.shape[0]
    num_blocks = positions.shape[1] // size
    seen_by = seen_keys(positions)
    start = key_blocks(seen_by, queries=size, keys=size).own[:, :, None]
    last = end_blocks(seen_by, queries=size, keys=size)[:, None] - 1
    block = jnp.arange(num_blocks, dtype=positions.dtype)
    query = block[None, :, None]
    key = block[None, None]
    seen = ((start <= key) & (key <= query)).astype(jnp.int8)
    # The block to fetch: if none is visited, the one that is loaded already or comes next.
    before = num_blocks * jnp.arange(rows, dtype=positions.dtype)[:, None, None]
    small = jnp.int8 if rows * num_blocks <= 128 else jnp.int16  # scalar memory is scarce
    of_queries = (before + jnp.clip(key, start, query)).astype(small)
    of_keys = (before + jnp.clip(query, key, last)).astype(small)

    def one_row(x: Array, axis: int) -> Array:
        """Returns the rows' tables joined along `axis`; the other axis has one row's blocks."""
        shape = [1, num_blocks, num_blocks]
        shape[axis] *= rows
        return jnp.reshape(jnp.moveaxis(x, 0, axis - 1), shape)

    return (
        {"data_next": one_row(of_queries, 1), "block_mask": one_row(seen, 1)},
        {"data_next": one_row(of_keys, 2), "block_mask": one_row(seen, 2)},
    )
