"""Decode attention that reads pages where they lie, by the kernels that JAX maintains.

Both kernels want a pool as [kv_heads, pages, page_size, head_dim]. Ours, [pages, kv_heads, …], is
handed over without moving anything as a pool of one KV head and pages * kv_heads pages, and every
(row, KV head) as a sequence of its own with its own table.
"""

import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import paged_attention as gpu
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention_kernel as tpu
from jaxtyping import Array, Float, Int

PAGES_PER_BLOCK = 8  # pages that a kernel attends to at once; tables are padded to whole blocks
MAX_SPLITS = 16  # parts of a sequence that a GPU works on side by side
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
    """One query a head over the first `lengths[r]` ≥ 1 tokens of row r (Triton, split over length)."""
    # Parts behind a row's last page cost nothing.
    splits = min(-(-table.shape[1] // PAGES_PER_BLOCK), MAX_SPLITS)
    out = gpu.paged_attention(
        *_as_sequences(queries, keys, values, table, lengths, splits * PAGES_PER_BLOCK),
        pages_per_compute_block=PAGES_PER_BLOCK,
        k_splits=splits,
        interpret=interpret,
    )
    return jnp.reshape(out, queries.shape)


def attend_on_tpu(
    queries: Float[Array, "rows kv_heads queries_per_kv head_dim"],
    keys: Float[Array, "pages kv_heads page_size head_dim"],
    values: Float[Array, "pages kv_heads page_size head_dim"],
    table: Int[Array, "rows width"],
    lengths: Int[Array, " rows"],
) -> Float[Array, "rows kv_heads queries_per_kv head_dim"]:
    """As `attend_on_gpu`, for a TPU; the head dimension is to be a multiple of 128."""
    q, k, v, indices, lengths = _as_sequences(
        queries, keys, values, table, lengths, PAGES_PER_BLOCK
    )
    at_once = max(TPU_TABLE // indices.shape[1], 1)
    parts = [slice(begin, begin + at_once) for begin in range(0, len(q), at_once)]
    out = [
        tpu.paged_attention(
            q[part], k, v, lengths[part], indices[part], pages_per_compute_block=PAGES_PER_BLOCK
        )
        for part in parts
    ]
    return jnp.reshape(jnp.concatenate(out), queries.shape)


def _as_sequences(
    queries: Array, keys: Array, values: Array, table: Array, lengths: Array, multiple: int
) -> tuple[Array, Array, Array, Array, Array]:
    rows, heads, group, dim = queries.shape
    pages, _, page_size, _ = keys.shape
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % multiple)))
    of_head = table[:, None, :] * heads + jnp.arange(heads)[None, :, None]
    pool = (1, pages * heads, page_size, dim)
    return (
        # The kernels do not scale the scores.
        jnp.reshape(queries * jnp.asarray(dim**-0.5, queries.dtype), (rows * heads, group, dim)),
        jnp.reshape(keys, pool),
        jnp.reshape(values, pool),
        jnp.reshape(of_head, (rows * heads, -1)),
        jnp.repeat(lengths, heads),
    )
