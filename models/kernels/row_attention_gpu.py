"""Attention within packed rows on a GPU, forward and backward, by our own kernels.

These are FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691, algorithms 1 and 2). A loop
over keys begins at the first key that a query of the block sees. A loop over queries ends at the
last query that sees a key of the block. Queries that share a KV head read it in place.
`benchmarks/reports/targets.md` says why no library's kernel is used.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from pat_jax.models.kernels.row_bounds import Seen, end_blocks, seen_keys
from pat_jax.models.kernels.row_kernels_gpu import (
    Tile,
    forward_kernel,
    to_keys_kernel,
    to_queries_kernel,
)
from pat_jax.models.rematerialization import kept_of_attention

LEAST_DIM = 16  # least dimension of a product on tensor cores

Queries = Float[Array, "rows length kv_heads queries_per_kv head_dim"]
Context = Float[Array, "rows length kv_heads head_dim"]
OfQuery = Float[Array, "rows kv_heads queries_per_kv length"]


class Tiles(NamedTuple):
    """The tile sizes of the three kernels."""

    forward: Tile
    to_queries: Tile  # backward, for the gradient of queries
    to_keys: Tile  # backward, for the gradients of keys and values


# By bytes per value, for heads up to 128 wide: the largest tiles without register spills, as
# compiled for compute capabilities 8.0 and 9.0.
TILES = {
    2: Tiles(Tile(128, 64, 8), Tile(64, 64, 4), Tile(64, 64, 8)),
    4: Tiles(Tile(64, 32, 4), Tile(32, 32, 4), Tile(32, 32, 4)),
}
WIDEST = 128
STAGES = 2  # number of pipeline stages: a loop's blocks that are loaded at once


def attend_on_gpu(
    queries: Queries,
    keys: Float[Array, "rows kv_heads length head_dim"],
    values: Float[Array, "rows kv_heads length head_dim"],
    positions: Int[Array, "rows length"],
    *,
    interpret: bool = False,
) -> Queries:
    """Implements `row_attention.attend_rows` on a GPU."""
    return _attend(interpret, queries, keys, values, positions)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(interpret: bool, queries: Array, keys: Array, values: Array, positions: Array) -> Array:
    return _forward(interpret, queries, keys, values, positions)[0]


def _forward(interpret: bool, queries: Array, keys: Array, values: Array, positions: Array):
    padded = _Padded.of(queries, keys, values, positions)
    out, sums = _attended(padded, interpret)
    out, sums = kept_of_attention(out[:, : queries.shape[1], ..., : queries.shape[-1]], sums)
    return out, (queries, keys, values, positions, out, sums)


def _backward(interpret: bool, residuals: tuple[Array, ...], grads: Array):
    queries, keys, values, positions, out, sums = residuals
    padded = _Padded.of(queries, keys, values, positions)
    along = jnp.sum(grads.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    along = _filled(jnp.moveaxis(along, 1, 3), 3, sums.shape[3])
    to_queries, to_keys, to_values = _gradients(padded, padded.like(grads), sums, along, interpret)
    length = queries.shape[1]
    dim = queries.shape[-1]
    to_context = [jnp.swapaxes(x[:, :length, :, :dim], 1, 2) for x in (to_keys, to_values)]
    return to_queries[:, :length, ..., :dim], *to_context, None


_attend.defvjp(_forward, _backward)


class _Padded(NamedTuple):
    """The kernels' inputs, padded to whole tiles and to heads as wide as a power of two."""

    queries: Queries
    keys: Context
    values: Context
    seen: Seen  # the keys that each query sees
    scale: float
    tiles: Tiles

    @classmethod
    def of(cls, queries: Array, keys: Array, values: Array, positions: Array) -> "_Padded":
        dim = queries.shape[-1]
        tiles = _tiles(queries)
        whole = max(max(tile.queries, tile.keys) for tile in tiles)
        length = -(-queries.shape[1] // whole) * whole
        wide = max(pl.next_power_of_2(dim), LEAST_DIM)
        # Padding tokens are sequences of one token: position 0.
        seen = seen_keys(_filled(positions, 1, length))
        arrays = queries, jnp.swapaxes(keys, 1, 2), jnp.swapaxes(values, 1, 2)
        filled = [_filled(_filled(x, 1, length), -1, wide) for x in arrays]
        return cls(filled[0], filled[1], filled[2], seen, dim**-0.5, tiles)

    def like(self, x: Array) -> Queries:
        """Returns x padded as the queries are; it must have the unpadded queries' shape."""
        return _filled(_filled(x, 1, self.queries.shape[1]), -1, self.queries.shape[-1])


def _tiles(queries: Array) -> Tiles:
    """Returns the tile sizes, which are smaller for heads wider than WIDEST."""
    by_width = max(1, pl.next_power_of_2(queries.shape[-1]) // WIDEST)
    return Tiles(
        *(
            Tile(max(tile.queries // by_width, 16), max(tile.keys // by_width, 16), tile.warps)
            for tile in TILES[queries.dtype.itemsize]
        )
    )


def _filled(x: Array, axis: int, size: int) -> Array:
    filling = [(0, 0)] * x.ndim
    filling[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, filling)


def _attended(x: _Padded, interpret: bool) -> tuple[Queries, OfQuery]:
    """Returns the attention, and the base-2 logarithm of each query's sum of exponentials."""
    rows, _, heads, group, _ = x.queries.shape
    at = _ByQueries(x.queries, x.tiles.forward)
    tile = x.tiles.forward
    sums = jax.ShapeDtypeStruct((rows, heads, group, x.queries.shape[1]), jnp.float32)
    return pl.pallas_call(
        functools.partial(forward_kernel, tile=tile, scale=x.scale),
        grid=at.grid,
        in_specs=at.forward,
        out_specs=[at.queries, at.of_query],
        out_shape=[jax.ShapeDtypeStruct(x.queries.shape, x.queries.dtype), sums],
        name="attend_rows",
        **_options(tile, interpret),
    )(*x.seen, x.queries, x.keys, x.values)


def _gradients(
    x: _Padded, grads: Queries, sums: OfQuery, along: OfQuery, interpret: bool
) -> tuple[Queries, Context, Context]:
    arrays = *x.seen, x.queries, x.keys, x.values, grads, sums, along
    at = _ByQueries(x.queries, x.tiles.to_queries)
    tile = x.tiles.to_queries
    to_queries = pl.pallas_call(
        functools.partial(to_queries_kernel, tile=tile, scale=x.scale),
        grid=at.grid,
        in_specs=at.backward,
        out_specs=at.queries,
        out_shape=jax.ShapeDtypeStruct(x.queries.shape, x.queries.dtype),
        name="attend_rows_to_queries",
        **_options(tile, interpret),
    )(*arrays)
    at = _ByKeys(x.queries, x.tiles.to_keys)
    tile = x.tiles.to_keys
    to_keys, to_values = pl.pallas_call(
        functools.partial(to_keys_kernel, tile=tile, scale=x.scale),
        grid=at.grid,
        in_specs=at.backward,
        out_specs=[at.context, at.context],
        out_shape=[jax.ShapeDtypeStruct(x.keys.shape, x.keys.dtype)] * 2,
        name="attend_rows_to_keys",
        **_options(tile, interpret),
    )(end_blocks(x.seen, queries=tile.queries, keys=tile.keys), *arrays)
    return to_queries, to_keys, to_values


def _options(tile: Tile, interpret: bool) -> dict[str, Any]:
    params = triton.CompilerParams(num_warps=tile.warps, num_stages=STAGES)
    return {"compiler_params": params, "interpret": interpret}


class _ByQueries:
    """Block specs for one program per block of queries, query head and row. It reads all keys."""

    def __init__(self, queries: Queries, tile: Tile):
        rows, length, heads, group, dim = queries.shape
        size = tile.queries
        last = length // tile.queries - 1
        self.grid = last + 1, heads * group, rows
        # Blocks with most keys go first, so that shorter programs fill the last round.
        self.seen = pl.BlockSpec((None, size), lambda i, _, row: (row, last - i))
        self.queries = pl.BlockSpec(
            (None, size, None, None, dim),
            lambda i, head, row: (row, last - i, head // group, head % group, 0),
        )
        self.of_query = pl.BlockSpec(
            (None, None, None, size),
            lambda i, head, row: (row, head // group, head % group, last - i),
        )
        self.context = pl.BlockSpec(
            (None, length, None, dim), lambda _, head, row: (row, 0, head // group, 0)
        )
        self.forward = [*[self.seen] * 3, self.queries, self.context, self.context]
        self.backward = [*self.forward, self.queries, self.of_query, self.of_query]


class _ByKeys:
    """Block specs for one program per block of keys, KV head and row. It reads all queries that
    share the KV head."""

    def __init__(self, queries: Queries, tile: Tile):
        rows, length, heads, group, dim = queries.shape
        self.grid = length // tile.keys, heads, rows
        self.end = pl.BlockSpec((None, 1), lambda j, _, row: (row, j))
        self.seen = pl.BlockSpec((None, length), lambda _j, _, row: (row, 0))
        self.queries = pl.BlockSpec(
            (None, length, None, group, dim), lambda _, head, row: (row, 0, head, 0, 0)
        )
        self.of_query = pl.BlockSpec(
            (None, None, group, length), lambda _, head, row: (row, head, 0, 0)
        )
        self.context = pl.BlockSpec(
            (None, tile.keys, None, dim), lambda j, head, row: (row, j, head, 0)
        )
        forward = [self.end, *[self.seen] * 3, self.queries, self.context, self.context]
        self.backward = [*forward, self.queries, self.of_query, self.of_query]
