"""The programs of the kernels of `row_attention_gpu.py`, in Pallas for Triton."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array

from pat_jax.models.kernels.row_bounds import Seen, is_seen
from pat_jax.models.layers import MASKED

LOG2_E = math.log2(math.e)  # kernels use exp2, for which a GPU has an instruction


class Tile(NamedTuple):
    """The numbers of queries and of keys in a block, and of warps in a program."""

    queries: int
    keys: int
    warps: int


def forward_kernel(
    own_ref, first_ref, shared_ref, queries_ref, keys_ref, values_ref, out_ref, sums_ref,
    *, tile: Tile, scale: float,
):  # fmt: skip
    i = pl.num_programs(0) - 1 - pl.program_id(0)
    queries = queries_ref[...]
    seen = _of_queries(own_ref, first_ref, shared_ref)
    query = i * tile.queries + jnp.arange(tile.queries)[:, None]
    blocks, block_at = _blocks_of_keys(own_ref, first_ref, shared_ref, i, tile)

    def over_keys(turn, carry):
        out, largest, total = carry
        j = block_at(turn)
        at = pl.ds(j * tile.keys, tile.keys)
        scores = triton.dot(queries, keys_ref[at, :].T) * (scale * LOG2_E)
        key = j * tile.keys + jnp.arange(tile.keys)[None]
        scores = jnp.where(is_seen(seen, query, key), scores, MASKED)
        # If a block masks all keys of a query, the sums so far are multiplied by 0 at the first key
        # that the query sees, at the latest itself.
        larger = jnp.maximum(largest, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - larger[:, None])
        fading = jnp.exp2(largest - larger)
        values = values_ref[at, :]
        out = out * fading[:, None] + triton.dot(weights.astype(values.dtype), values)
        return out, larger, total * fading + jnp.sum(weights, axis=1)

    of_query = (tile.queries,)
    begun = jnp.zeros(queries.shape), jnp.full(of_query, MASKED), jnp.zeros(of_query)
    out, largest, total = jax.lax.fori_loop(0, blocks, over_keys, begun)
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)
    sums_ref[...] = largest + jnp.log2(total)


def to_queries_kernel(
    own_ref, first_ref, shared_ref, queries_ref, keys_ref, values_ref, grads_ref, sums_ref, along_ref,
    out_ref, *, tile: Tile, scale: float,
):  # fmt: skip
    i = pl.num_programs(0) - 1 - pl.program_id(0)
    queries, grads, sums, along = queries_ref[...], grads_ref[...], sums_ref[...], along_ref[...]
    seen = _of_queries(own_ref, first_ref, shared_ref)
    query = i * tile.queries + jnp.arange(tile.queries)[:, None]
    blocks, block_at = _blocks_of_keys(own_ref, first_ref, shared_ref, i, tile)

    def over_keys(turn, out):
        j = block_at(turn)
        at = pl.ds(j * tile.keys, tile.keys)
        keys, values = keys_ref[at, :], values_ref[at, :]
        key = j * tile.keys + jnp.arange(tile.keys)[None]
        scores = triton.dot(queries, keys.T) * (scale * LOG2_E) - sums[:, None]
        weights = jnp.where(is_seen(seen, query, key), jnp.exp2(scores), 0)
        to_scores = weights * (triton.dot(grads, values.T) - along[:, None])
        return out + triton.dot(to_scores.astype(keys.dtype), keys)

    out = jax.lax.fori_loop(0, blocks, over_keys, jnp.zeros(queries.shape))
    out_ref[...] = (out * scale).astype(out_ref.dtype)


def to_keys_kernel(
    end_ref, own_ref, first_ref, shared_ref, queries_ref, keys_ref, values_ref, grads_ref, sums_ref,
    along_ref, to_keys_ref, to_values_ref,
    *, tile: Tile, scale: float,
):  # fmt: skip
    j = pl.program_id(0)
    keys, values = keys_ref[...], values_ref[...]
    key = j * tile.keys + jnp.arange(tile.keys)[:, None]
    start = j * tile.keys // tile.queries
    stop = end_ref[0]

    def over_queries(turn, carry):
        to_keys, to_values = carry
        head = turn // (stop - start)
        i = start + turn % (stop - start)
        at = pl.ds(i * tile.queries, tile.queries)
        queries, grads = queries_ref[at, head, :], grads_ref[at, head, :]
        sums, along = sums_ref[head, at], along_ref[head, at]
        query = i * tile.queries + jnp.arange(tile.queries)[None]
        scores = triton.dot(keys, queries.T) * (scale * LOG2_E) - sums[None]
        seen = Seen(*(ref[at][None] for ref in (own_ref, first_ref, shared_ref)))
        weights = jnp.where(is_seen(seen, query, key), jnp.exp2(scores), 0)
        to_values += triton.dot(weights.astype(grads.dtype), grads)
        to_scores = weights * (triton.dot(values, grads.T) - along[None])
        return to_keys + triton.dot(to_scores.astype(queries.dtype), queries), to_values

    begun = jnp.zeros(keys.shape), jnp.zeros(keys.shape)
    turns = queries_ref.shape[1] * (stop - start)
    to_keys, to_values = jax.lax.fori_loop(0, turns, over_queries, begun)
    to_keys_ref[...] = (to_keys * scale).astype(to_keys_ref.dtype)
    to_values_ref[...] = to_values.astype(to_values_ref.dtype)


def _of_queries(*refs: Any) -> Seen:
    """Returns what the queries of a block see, as columns to compare with a row of keys."""
    return Seen(*(ref[...][:, None] for ref in refs))


def _blocks_of_keys(
    own_ref: Any, first_ref: Any, shared_ref: Any, i: Array, tile: Tile
) -> tuple[Array, Callable[[Array], Array]]:
    """Returns the number of key blocks that query block i sees, and a function that gives the index
    of the n-th of them."""
    own, first = own_ref[0] // tile.keys, first_ref[0] // tile.keys
    shared = jnp.minimum(pl.cdiv(shared_ref[0], tile.keys), own) - first
    count = shared + pl.cdiv((i + 1) * tile.queries, tile.keys) - own
    return count, lambda n: jnp.where(n < shared, first + n, own + n - shared)
