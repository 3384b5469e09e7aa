"""Blockwise attention within packed rows, in plain operations that run anywhere.

On a CPU it is the fastest way, forward and backward.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pat_jax.models.kernels.row_bounds import Seen, is_seen, key_blocks, seen_keys
from pat_jax.models.layers import MASKED, attention_scores
from pat_jax.models.rematerialization import kept_of_attention

# Queries and keys of a block. With 64 a CPU is as fast at 4,096 tokens, and slower with short rows.
BLOCK = 32

Queries = Float[Array, "rows length kv_heads queries_per_kv head_dim"]
Context = Float[Array, "rows kv_heads length head_dim"]
Positions = Int[Array, "rows length"]


@jax.custom_vjp
def attend_in_blocks(
    queries: Queries, keys: Context, values: Context, positions: Positions
) -> Queries:
    """Implements `row_attention.attend_rows` in plain operations.

    Scores are float32 and exist for one block of queries at a time; the backward pass recomputes
    them. Blocks of keys that no query of a block sees in any row are skipped: later ones, and those
    of other sequences and branches (Dao et al. 2022, https://arxiv.org/abs/2205.14135, algorithms 1
    and 4, by blocks).
    """
    return _forward(queries, keys, values, positions)[0]


def _forward(queries: Array, keys: Array, values: Array, positions: Array):
    out, sums = _skipping(queries, keys, values, positions)
    out, sums = kept_of_attention(out, sums)
    return out, (queries, keys, values, positions, out, sums)


def _to_blocks(x: Array, num_blocks: int, size: int, *, axis: int) -> Array:
    """Returns x with `axis`, padded with 0, split into blocks: [num_blocks, …, size, …]."""
    filling = [(0, 0)] * x.ndim
    filling[axis] = (0, num_blocks * size - x.shape[axis])
    shape = (*x.shape[:axis], num_blocks, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(jnp.reshape(jnp.pad(x, filling), shape), axis, 0)


def _from_blocks(blocks: Array, length: int, *, axis: int) -> Array:
    x = jnp.moveaxis(blocks, 0, axis)
    x = jnp.reshape(x, (*x.shape[:axis], -1, *x.shape[axis + 2 :]))
    return jax.lax.slice_in_dim(x, 0, length, axis=axis)


def _grid(length: int) -> tuple[int, int]:
    """Returns the number of blocks of a row, and the number of tokens of each block."""
    num_blocks = -(-length // BLOCK)
    return num_blocks, -(-length // num_blocks)


def _seen(positions: Array, num_blocks: int, size: int) -> tuple[Seen, Array, Array]:
    """Returns the keys that each query sees, and two arrays for each block of queries: how many
    blocks of keys some of its queries see in any row, and, after each block of keys, the index of
    the next lower one to visit."""
    filling = (0, 0), (0, num_blocks * size - positions.shape[1])
    seen = seen_keys(jnp.pad(positions, filling))  # padding tokens are sequences of one token
    own, first, shared = (x[..., None] for x in key_blocks(seen, queries=size, keys=size))
    block = jnp.arange(own.shape[1], dtype=own.dtype)
    key = block[None, None]
    visits = ((own <= key) & (key <= block[None, :, None])) | ((first <= key) & (key < shared))
    visits = jnp.any(visits, axis=0)
    last = jax.lax.cummax(jnp.where(visits, block[None], -1), axis=1)
    before = jnp.pad(last[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    return seen, jnp.sum(visits, axis=1, dtype=own.dtype), before


def _visible(seen: Seen, i: Array, j: Array) -> Array:
    """Whether each query of block i sees each key of block j: [rows, 1, 1, queries, keys]."""
    size = seen.own.shape[1]
    at = jnp.arange(size, dtype=seen.own.dtype)
    by_query = Seen(*(x[:, :, None] for x in seen))
    visible = is_seen(by_query, i * size + at[None, :, None], j * size + at[None, None])
    return visible[:, None, None]


def _product(subscripts: str, x: Array, y: Array) -> Array:
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


def _scores(query: Array, of_keys: Array, seen: Seen, i: Array, j: Array) -> Array:
    """Returns scores of blocks i and j as [rows, kv_heads, queries_per_kv, queries, keys]."""
    return jnp.where(_visible(seen, i, j), attention_scores(query, of_keys[j]), MASKED)


def _skipping(queries: Array, keys: Array, values: Array, positions: Array) -> tuple[Array, Array]:
    """Returns the attention and each query's logsumexp, visiting only blocks that are seen."""
    length = queries.shape[1]
    num_blocks, size = _grid(length)
    seen, counts, before = _seen(positions, num_blocks, size)
    of_keys, of_values = (_to_blocks(x, num_blocks, size, axis=2) for x in (keys, values))
    rows, _, kv, group, dim = queries.shape

    def one_block(block: tuple[Array, Array, Array, Array, Seen]) -> tuple[Array, Array]:
        i, count, earlier, query, seen = block

        def add(_: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            j, most, total, out = carry
            scores = _scores(query, of_keys, seen, i, j)
            larger = jnp.maximum(most, jnp.max(scores, axis=-1))
            weights = jnp.exp(scores - larger[..., None])
            fading = jnp.exp(most - larger)
            product = _product("bkgts,bksd->bkgtd", weights.astype(values.dtype), of_values[j])
            total = total * fading + jnp.sum(weights, axis=-1)
            return earlier[j], larger, total, out * fading[..., None] + product

        shape = rows, kv, group, size
        # From the block's own keys downwards: each query sees itself there, so that masked scores
        # of later blocks count exactly 0.
        zeros = jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, dim), jnp.float32)
        begun = i, jnp.full(shape, MASKED, jnp.float32), *zeros
        _, most, total, out = jax.lax.fori_loop(0, count, add, begun)
        attended = jnp.moveaxis(out / total[..., None], 3, 1).astype(queries.dtype)
        return attended, most + jnp.log(total)

    number = jnp.arange(num_blocks, dtype=positions.dtype)
    of_queries, *by_query = (_to_blocks(x, num_blocks, size, axis=1) for x in (queries, *seen))
    out, sums = jax.lax.map(one_block, (number, counts, before, of_queries, Seen(*by_query)))
    return _from_blocks(out, length, axis=1), _from_blocks(sums, length, axis=3)


def _gradients(
    query: Array, key: Array, value: Array, grad: Array, weights: Array, along: Array
) -> tuple[Array, Array, Array]:
    """Returns one block pair's contributions to the gradients of queries, keys and values.

    Args:
      grad: gradient of the attention of the block of queries.
      weights: attention weights, [rows, kv_heads, queries_per_kv, queries, keys].
      along: Σ grad * attention for each query.
    """
    dtype = query.dtype
    scale = query.shape[-1] ** -0.5
    to_value = _product("bkgts,btkgd->bksd", weights.astype(dtype), grad)
    to_weights = _product("btkgd,bksd->bkgts", grad, value)
    to_scores = (weights * (to_weights - along[..., None]) * scale).astype(dtype)
    to_query = _product("bkgts,bksd->btkgd", to_scores, key)
    return to_query, _product("bkgts,btkgd->bksd", to_scores, query), to_value


def _backward(residuals: tuple[Array, ...], grads: Array) -> tuple[Array, Array, Array, None]:
    queries, keys, values, positions, out, sums = residuals
    length = queries.shape[1]
    num_blocks, size = _grid(length)
    seen, counts, before = _seen(positions, num_blocks, size)
    of_keys, of_values = (_to_blocks(x, num_blocks, size, axis=2) for x in (keys, values))
    through = jnp.sum(grads.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    of_queries, of_grads, *by_query = (
        _to_blocks(x, num_blocks, size, axis=1) for x in (queries, grads, *seen)
    )
    by_score = [
        _to_blocks(x, num_blocks, size, axis=3) for x in (sums, jnp.moveaxis(through, 1, 3))
    ]

    def one_block(carry: tuple[Array, Array], block: tuple[Any, ...]) -> tuple[Any, Array]:
        i, count, earlier, query, grad, seen, total, along = block

        def add(_: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            j, to_query, to_keys, to_values = carry
            weights = jnp.exp(_scores(query, of_keys, seen, i, j) - total[..., None])
            more, to_key, to_value = _gradients(
                query, of_keys[j], of_values[j], grad, weights, along
            )
            to_keys, to_values = to_keys.at[j].add(to_key), to_values.at[j].add(to_value)
            return earlier[j], to_query + more, to_keys, to_values

        begun = i, jnp.zeros(query.shape, jnp.float32), *carry
        _, to_query, to_keys, to_values = jax.lax.fori_loop(0, count, add, begun)
        return (to_keys, to_values), to_query.astype(queries.dtype)

    zeros = jnp.zeros(of_keys.shape, jnp.float32)
    number = jnp.arange(num_blocks, dtype=positions.dtype)
    blocks = number, counts, before, of_queries, of_grads, Seen(*by_query), *by_score
    (to_keys, to_values), to_queries = jax.lax.scan(one_block, (zeros, zeros), blocks)
    return (
        _from_blocks(to_queries, length, axis=1),
        _from_blocks(to_keys, length, axis=2).astype(queries.dtype),
        _from_blocks(to_values, length, axis=2).astype(queries.dtype),
        None,
    )


attend_in_blocks.defvjp(_forward, _backward)
