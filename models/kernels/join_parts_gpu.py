"""Joins attention over parts of each row's keys into attention over all of them, on a GPU.

XLA would take up to four kernels for it: the maximum, the sum, the weighted sum, and a slice.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float


@functools.partial(jax.jit, static_argnames=("count", "interpret"))
def join_parts(
    out: Float[Array, "parts rows kv_heads queries head_dim"],
    logsumexp: Float[Array, "parts rows kv_heads queries"],
    count: int,
    *,
    interpret: bool = False,
) -> Float[Array, "rows kv_heads count head_dim"]:
    """Returns the attention of the first `count` queries of each row and KV head.

        joined = Σ_p exp(logsumexp_p) · out_p / Σ_p exp(logsumexp_p)

    Args:
      out: attention over the keys of each part. The number of parts is a power of two.
      logsumexp: logarithm of the sum of exponentials of a query's scores in the part; -inf if it
        has no keys.
    """
    parts, rows, heads, _, dim = out.shape
    if parts == 1:
        return out[0, :, :, :count]
    return pl.pallas_call(
        _join,
        grid=(rows, heads, count),
        in_specs=[
            pl.BlockSpec((parts, None, None, None, dim), lambda *at: (0, *at, 0)),
            pl.BlockSpec((parts, None, None, None), lambda *at: (0, *at)),
        ],
        out_specs=pl.BlockSpec((None, None, None, dim), lambda *at: (*at, 0)),
        out_shape=jax.ShapeDtypeStruct((rows, heads, count, dim), out.dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="join_parts",
    )(out, logsumexp)


def _join(out_ref, logsumexp_ref, joined_ref):
    logsumexp = logsumexp_ref[...]
    weights = jnp.exp(logsumexp - jnp.max(logsumexp))
    weighted = jnp.sum(out_ref[...].astype(jnp.float32) * weights[:, None], axis=0)
    joined_ref[...] = (weighted / jnp.sum(weights)).astype(joined_ref.dtype)
