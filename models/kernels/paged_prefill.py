"""Prefill attention that reads pages in place: many blocks of queries, each within one page.

This is flash attention (arXiv 2307.08691) with a block table, since no kernel of JAX fits. For GPUs
JAX has none that reads pages; ours can also split the keys of a row over programs, for decoding.
`paged_tpu` is the same for TPUs.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from pat_jax.models.kernels.join_parts_gpu import join_parts
from pat_jax.models.layers import MASKED, sees

GPU_QUERIES = 64  # most queries of one program: more do not fit its registers
GPU_KEYS = 64  # keys that a program multiplies at once
# The keys of a row are split into ROW_PARTS until there are GPU_PROGRAMS: a long row among short ones
# then does not run alone for long (`benchmarks/reports/speed.md`). Few queries are split further,
# until as many programs run as a GPU runs at once: even one row with one KV head then occupies it.
GPU_PROGRAMS = 2048
ROW_PARTS = 16
GPU_AT_ONCE = 512
GPU_PARTS = 128  # most parts of a row's keys
SMALL_TILE = 32  # queries of a program that mostly waits for memory
LEAST_SIDE = 16  # least dimension of a product on tensor cores; rows of a TPU's bfloat16 register


def fits_gpu(page_size: int, head_dim: int) -> bool:
    """Whether the GPU kernels, also for decoding, can be lowered: Triton needs powers of two."""
    return page_size.bit_count() == head_dim.bit_count() == 1 and head_dim >= LEAST_SIDE


@functools.partial(jax.jit, static_argnames=("interpret",))
def attend_blocks_on_gpu(
    queries: Float[Array, "rows length kv_heads queries_per_kv head_dim"],
    keys: Float[Array, "pages kv_heads page_size head_dim"],
    values: Float[Array, "pages kv_heads page_size head_dim"],
    table: Int[Array, "rows width"],
    start: Int[Array, " rows"],
    trunk: Int[Array, " rows"] | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "rows length kv_heads queries_per_kv head_dim"]:
    """Returns attention to the pages for row r's tokens `start[r]` … `start[r]` + length - 1.

    Each query sees the keys up to its own; `trunk` is for rows with a branch (`layers.sees`). One
    program runs for each row, each KV head, each part of the row's keys, and each `GPU_QUERIES` of
    the queries that share the KV head.
    """
    rows, length, heads, group, dim = queries.shape
    count = length * group
    tile = min(max(pl.next_power_of_2(count), LEAST_SIDE), GPU_QUERIES)
    table = whole_turns(table, at_once := max(GPU_KEYS // keys.shape[2], 1))
    grid = rows, heads, pl.cdiv(count, tile)
    parts = _parts(math.prod(grid), tile, table.shape[1] // at_once)
    taken, given = _blocks_on_gpu(table.shape[1], keys.shape, count, tile, dim)
    shape = parts, rows, heads, grid[2] * tile
    out, logsumexp = pl.pallas_call(
        functools.partial(
            _attend_on_gpu, length=length, at_once=at_once, parts=parts, branches=trunk is not None
        ),
        grid=(*grid, parts),
        in_specs=taken,
        out_specs=given,
        out_shape=[
            jax.ShapeDtypeStruct((*shape, dim), queries.dtype),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ],
        compiler_params=_schedule(tile),
        interpret=interpret,
        name="attend_blocks",
    )(start, start if trunk is None else trunk, table, by_head(queries, 1), keys, values)
    return by_token(join_parts(out, logsumexp, count, interpret=interpret), length, group)


def _parts(programs: int, tile: int, turns: int) -> int:
    """Returns into how many parts the keys of each row are split: a power of two.

    Args:
      programs: number of programs without splitting.
      turns: turns of the loop over the keys of the longest row.
    """
    wanted = min(GPU_PROGRAMS, ROW_PARTS * programs)
    if tile <= SMALL_TILE:
        wanted = max(wanted, GPU_AT_ONCE)
    most = max(min(wanted // programs, GPU_PARTS, turns), 1)
    return 1 << most.bit_length() - 1


def _blocks_on_gpu(
    width: int, pool_shape: tuple[int, ...], count: int, tile: int, dim: int
) -> tuple[list[pl.BlockSpec], list[pl.BlockSpec]]:
    """Returns the blocks that a program reads (its row's start, trunk and table, all queries of the
    KV head, both pools), and those that it writes."""
    number = pl.BlockSpec((1,), lambda row, *_: (row,))
    of_row = pl.BlockSpec((None, width), lambda row, *_: (row, 0))
    asked = pl.BlockSpec((None, None, count, dim), lambda row, head, *_: (row, head, 0, 0))
    pool = pl.BlockSpec(pool_shape, lambda *_: (0, 0, 0, 0))
    return [number, number, of_row, asked, pool, pool], [
        pl.BlockSpec((None, None, None, tile, dim), lambda *at: (at[3], *at[:3], 0)),
        pl.BlockSpec((None, None, None, tile), lambda *at: (at[3], *at[:3])),
    ]


def _schedule(tile: int) -> triton.CompilerParams:
    """Returns parameters that let small tiles run in more programs at a time instead of loading
    ahead: this was faster on an H200."""
    is_small = tile <= SMALL_TILE
    return triton.CompilerParams(num_warps=2 if is_small else 4, num_stages=1 if is_small else 2)


def _attend_on_gpu(
    start_ref, trunk_ref, table_ref, queries_ref, keys_ref, values_ref, out_ref, logsumexp_ref,
    *, length: int, at_once: int, parts: int, branches: bool,
):  # fmt: skip
    head, nth, part = (pl.program_id(axis) for axis in (1, 2, 3))
    page_size = keys_ref.shape[2]
    tile, dim = out_ref.shape
    # Behind the last query, the last tile repeats it: padded queries would need a kernel of XLA's.
    nth_query = jnp.minimum(nth * tile + jnp.arange(tile), queries_ref.shape[0] - 1)
    queries = queries_ref[nth_query]
    query = (nth_query % length)[:, None]
    start = start_ref[0]
    trunk = trunk_ref[0] if branches else None

    def over_pages(turn, carry):
        out, largest, total = carry
        pages = table_ref[pl.ds(turn * at_once, at_once)]
        keys, values = (
            jnp.reshape(ref[pages, head], (at_once * page_size, dim))
            for ref in (keys_ref, values_ref)
        )
        scores = triton.dot(queries, keys.T) * dim**-0.5
        column = turn * at_once * page_size + jnp.arange(at_once * page_size)[None]
        scores = jnp.where(sees(query, column, start, trunk), scores, MASKED)
        new_largest = jnp.maximum(largest, jnp.max(scores, axis=1))
        weights = jnp.exp(scores - new_largest[:, None])
        kept = jnp.exp(largest - new_largest)
        out = out * kept[:, None] + triton.dot(weights.astype(values.dtype), values)
        return out, new_largest, total * kept + jnp.sum(weights, axis=1)

    nothing = jnp.zeros((tile, dim)), jnp.full(tile, MASKED), jnp.zeros(tile)
    turns = pl.cdiv(start_ref[0] + length, at_once * page_size)
    each = pl.cdiv(turns, parts)
    stop = jnp.minimum((part + 1) * each, turns)
    out, largest, total = jax.lax.fori_loop(part * each, stop, over_pages, nothing)
    # The largest weight is 1, so the total is less only where the part has no turn.
    out_ref[...] = (out / jnp.maximum(total, 1)[:, None]).astype(out_ref.dtype)
    logsumexp_ref[...] = largest + jnp.log(total)


def by_head(queries: Array, multiple: int) -> Array:
    """Returns the queries as [rows, kv_heads, queries that share the KV head, head_dim], padded."""
    rows, length, heads, group, dim = queries.shape
    flat = jnp.reshape(jnp.transpose(queries, (0, 2, 3, 1, 4)), (rows, heads, group * length, dim))
    return jnp.pad(flat, ((0, 0), (0, 0), (0, -flat.shape[2] % multiple), (0, 0)))


def by_token(flat: Array, length: int, group: int) -> Array:
    rows, heads, _, dim = flat.shape
    out = jnp.reshape(flat[:, :, : group * length], (rows, heads, group, length, dim))
    return jnp.transpose(out, (0, 3, 1, 2, 4))


def whole_turns(table: Array, at_once: int) -> Array:
    return jnp.pad(table, ((0, 0), (0, -table.shape[1] % at_once)))
