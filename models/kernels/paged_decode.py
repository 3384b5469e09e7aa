"""Decode attention on a TPU that reads pages in place: one query per row.

This is JAX's kernel, which needs a pool as [kv_heads, pages, page_size, head_dim]. Our pool,
[pages, kv_heads, …], is passed without a copy as one KV head with pages * kv_heads pages. Every
(row, KV head) is then a sequence with its own table. On a GPU the prefill kernel decodes, too.
"""

import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention_kernel as tpu
from jaxtyping import Array, Float, Int

PAGES_PER_BLOCK = 8  # pages that the TPU's kernel reads at once; tables are padded to whole blocks
TPU_TABLE = 2**17  # most entries of a table: a core's scalar memory holds twice as many


def attend_on_tpu(
    queries: Float[Array, "rows 1 kv_heads queries_per_kv head_dim"],
    keys: Float[Array, "pages kv_heads page_size head_dim"],
    values: Float[Array, "pages kv_heads page_size head_dim"],
    table: Int[Array, "rows width"],
    position: Int[Array, " rows"],
    trunk: None = None,
) -> Float[Array, "rows 1 kv_heads queries_per_kv head_dim"]:
    """Returns attention of the query at `position[r]` to row r's tokens up to its own. The head
    dimension must be a multiple of 128."""
    del trunk  # a single query is in no branch
    rows, _, heads, group, dim = queries.shape
    pages, _, page_size, _ = keys.shape
    pool = 1, pages * heads, page_size, dim
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % PAGES_PER_BLOCK)))
    of_head = table[:, None, :] * heads + jnp.arange(heads)[None, :, None]
    tables = jnp.reshape(of_head, (rows * heads, -1))
    ends = jnp.repeat(position + 1, heads)
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
