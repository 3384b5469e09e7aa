"""Finishes a new token of each row and appends it to its page, on a GPU in one kernel.

It adds the parts of products, then applies norms and rotation. XLA would take several kernels for
it, and one each to write keys and values.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from pat_jax.models.projected import Projected

Pool = Float[Array, "pages kv_heads page_size head_dim"]


def append_on_gpu(
    new: Projected,
    pools: tuple[Pool, Pool],
    pages: Int[Array, " rows"],
    start: Int[Array, " rows"],
    *,
    null_page: int,
    interpret: bool = False,
) -> tuple[Float[Array, "rows 1 kv_heads queries_per_kv head_dim"], tuple[Pool, Pool]]:
    """Returns the queries of `new.finished()`, and both pools with its keys and values.

    Row r's one token, at position `start[r]`, goes to `pages[r]`; zeros go to `null_page`. One
    program runs for each query head of each row; the first one of a KV head appends.
    """
    rows, _, heads, group, dim = new.queries.shape
    arrays, of_heads = _heads(new)
    number = pl.BlockSpec((1,), lambda row, *_: (row,))
    half = pl.BlockSpec((None, None, dim // 2), lambda row, *_: (row, 0, 0))
    scale = pl.BlockSpec((dim,), lambda *_: (0,))
    pool = pl.BlockSpec(pools[0].shape, lambda *_: (0, 0, 0, 0))
    query = pl.BlockSpec((None, None, None, None, dim), lambda row, *at: (row, 0, *at, 0))
    scales = new.norms or ()
    queries, keys, values = pl.pallas_call(
        functools.partial(_append, eps=new.eps, null_page=null_page),
        grid=(rows, heads, group),
        in_specs=[pool, pool, number, number, half, half, *of_heads, *[scale] * len(scales)],
        out_specs=[query, pool, pool],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (new.queries, *pools)],
        input_output_aliases={0: 1, 1: 2},
        compiler_params=triton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="append",
    )(*pools, pages, start, *new.rotation, *arrays, *scales)
    return queries, (keys, values)


def _heads(new: Projected) -> tuple[list[Array], list[pl.BlockSpec]]:
    """Returns the arrays that have the queries, keys and values, and the head of each program."""
    rows, _, heads, group, dim = new.queries.shape
    arrays, begins = list(new.parts), [0, 0, 0]
    if not arrays:
        arrays = [
            jnp.reshape(x, (1, rows, 1, -1, dim)) for x in (new.queries, new.keys, new.values)
        ]
    if len(arrays) == 1:
        arrays, begins = arrays * 3, [0, heads * group, heads * group + heads]
    block = len(arrays[0]), None, None, None, dim
    of_keys = [
        pl.BlockSpec(block, lambda row, head, _, begin=begin: (0, row, 0, begin + head, 0))
        for begin in begins[1:]
    ]
    of_queries = pl.BlockSpec(block, lambda row, head, nth: (0, row, 0, head * group + nth, 0))
    return arrays, [of_queries, *of_keys]


def _append(
    _, __, page_ref, start_ref, cos_ref, sin_ref, query_ref, key_ref, value_ref, *refs,
    eps: float, null_page: int,
):  # fmt: skip
    *scale_refs, out_ref, keys_ref, values_ref = refs
    head, nth, page = pl.program_id(1), pl.program_id(2), page_ref[0]
    offset = jax.lax.rem(start_ref[0], keys_ref.shape[2])
    cos, sin, dtype = cos_ref[...], sin_ref[...], out_ref.dtype
    halves = [pl.ds(begin, len(cos)) for begin in (0, len(cos))]

    def whole(ref) -> list[Array]:
        """Returns both halves of a head: the sums of its parts."""
        return [jnp.sum(ref[:, at].astype(jnp.float32), axis=0).astype(dtype) for at in halves]

    def finished(ref, which: int) -> list[Array]:
        """Returns both halves of a query or key as `Projected.finished` computes them."""
        x = [half.astype(jnp.float32) for half in whole(ref)]
        if scale_refs:
            mean = sum(jnp.sum(jnp.square(half)) for half in x) / (2 * len(cos))
            x = [(half * jax.lax.rsqrt(mean + eps)).astype(dtype) for half in x]
            scales = [scale_refs[which][at].astype(dtype) for at in halves]
            x = [(by * half).astype(jnp.float32) for by, half in zip(scales, x, strict=True)]
        return [x[0] * cos - x[1] * sin, x[1] * cos + x[0] * sin]

    def put(ref, token: list[Array]) -> None:
        for at, half in zip(halves, token, strict=True):
            kept = jnp.where(page == null_page, 0, half).astype(ref.dtype)
            ref[page, head, offset, at] = kept

    for at, half in zip(halves, finished(query_ref, 0), strict=True):
        out_ref[at] = half.astype(dtype)

    @pl.when(nth == 0)
    def _():
        put(keys_ref, finished(key_ref, 1))
        put(values_ref, whole(value_ref))
