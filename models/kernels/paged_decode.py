"""Decode attention that reads pages where they lie: one query a row.

On a GPU it is the kernel of prefill with the keys of a row in parts. On a TPU it is JAX's, which
wants a pool as [kv_heads, pages, page_size, head_dim]. Ours, [pages, kv_heads, …], is handed over
without moving anything as a pool of one KV head and pages * kv_heads pages, and every (row, KV
head) as a sequence of its own with its own table.
"""

import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention_kernel as tpu
from jaxtyping import Array, Float, Int

from pat_jax.models.kernels.paged_prefill import attend_blocks_on_gpu

GPU_KEYS = 128  # of a row at once: a tile has few queries, registers are free
GPU_PARTS = 16  # of a row's keys, side by side; those without keys cost next to nothing
PAGES_PER_BLOCK = 8  # that the TPU's kernel attends to at once; tables are padded to whole blocks
TPU_TABLE = 2**17  # entries of a table: a core's scalar memory holds twice as many


def attend_on_gpu(
    queries: Float[Array, "rows kv_heads queries_per_kv head_dim"],
    keys: Float[Array, "pages kv_heads page_size head_dim"],
    values: Float[Array, "pages kv_heads page_size head_dim"],
    table: Int[Array, "rows width"],
    lengths: Int[Array, " rows"],
    *,
    interpret: bool = False,
) -> Float[Array, "rows kv_heads queries_per_kv head_dim"]:
    """One query a head over the first `lengths[r]` ≥ 1 tokens of row r."""
    turns = -(-table.shape[1] * keys.shape[2] // GPU_KEYS)
    out = attend_blocks_on_gpu(
        queries[:, None],
        keys,
        values,
        table,
        lengths - 1,
        parts=min(turns, GPU_PARTS),
        keys_at_once=GPU_KEYS,
        interpret=interpret,
    )
    return out[:, 0]


def attend_on_tpu(
    queries: Float[Array, "rows kv_heads queries_per_kv head_dim"],
    keys: Float[Array, "pages kv_heads page_size head_dim"],
    values: Float[Array, "pages kv_heads page_size head_dim"],
    table: Int[Array, "rows width"],
    lengths: Int[Array, " rows"],
) -> Float[Array, "rows kv_heads queries_per_kv head_dim"]:
    """Does what `attend_on_gpu` does, on a TPU; the head dimension is to be a multiple of 128."""
    rows, heads, group, dim = queries.shape
    pages, _, page_size, _ = keys.shape
    pool = 1, pages * heads, page_size, dim
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % PAGES_PER_BLOCK)))
    of_head = table[:, None, :] * heads + jnp.arange(heads)[None, :, None]
    tables, ends = jnp.reshape(of_head, (rows * heads, -1)), jnp.repeat(lengths, heads)
    # The kernel does not scale the scores.
    scaled = queries * jnp.asarray(dim**-0.5, queries.dtype)
    scaled = jnp.reshape(scaled, (rows * heads, group, dim))
    at_once = max(TPU_TABLE // tables.shape[1], 1)
    parts = [slice(begin, begin + at_once) for begin in range(0, len(scaled), at_once)]
    out = [
        tpu.paged_attention(
            scaled[part],
            jnp.reshape(keys, pool),
            jnp.reshape(values, pool),
            ends[part],
            tables[part],
            pages_per_compute_block=PAGES_PER_BLOCK,
        )
        for part in parts
    ]
    return jnp.reshape(jnp.concatenate(out), queries.shape)
