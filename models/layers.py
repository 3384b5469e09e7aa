"""The mathematics of a decoder layer: products with weights, RMS norm, rotary positions,
attention."""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pat_jax.models.adapted_weight import AdaptedWeight
from pat_jax.models.config import ModelConfig, RopeScaling
from pat_jax.models.weight_formats import QuantizedWeight

MASKED = -1e30  # finite, so that a row without any visible key gives no NaN
FEW_TOKENS = 64  # up to so many tokens, a CPU multiplies weights by `_streamed`
BLOCK = 2**16  # values of a quantized weight that a CPU converts at once: best of 2^15 … 2^17
ExitHead = Float[Array, "embed embed"]


class Rotation(NamedTuple):
    """Cosine and sine of the rotary angles of some tokens."""

    cos: Float[Array, "rows length head_dim/2"]
    sin: Float[Array, "rows length head_dim/2"]


def linear(
    x: Float[Array, "*batch in"],
    weight: Float[Array, "out in"] | QuantizedWeight | AdaptedWeight,
    *,
    contracted: int = 1,
    dtype: jnp.dtype | None = None,
) -> Float[Array, "*batch out"]:
    """Returns x · weightᵀ over the last `contracted` dimensions of both, with weight in x's dtype.

    Args:
      weight: [*out, *in], so that the inputs of one output are contiguous in memory. A quantized
        weight's values are multiplied first; then the sums are scaled, in float32. For an adapted
        weight, (x · aᵀ) · bᵀ is added to the result.
      dtype: dtype of the sums and the result, or None for x's dtype.
    """
    if isinstance(weight, AdaptedWeight):
        low = linear(x, weight.a, contracted=contracted)
        more = linear(low, weight.b, dtype=dtype)
        return linear(x, weight.weight, contracted=contracted, dtype=dtype) + more
    dtype = dtype or x.dtype
    batch = x.shape[: x.ndim - contracted]
    if math.prod(batch) > FEW_TOKENS:
        return _plain(x, weight, contracted=contracted, dtype=dtype)
    return jax.lax.platform_dependent(
        x,
        weight,
        cpu=partial(_streamed, contracted=contracted, dtype=dtype),
        default=partial(_plain, contracted=contracted, dtype=dtype),
    )


def _plain(
    x: Array, weight: Array | QuantizedWeight, *, contracted: int, dtype: jnp.dtype
) -> Array:
    dims = tuple(range(-contracted, 0))
    if not isinstance(weight, QuantizedWeight):
        return _dot(x, weight.astype(x.dtype), (dims, dims), dtype)
    x, values = _in_step(x, weight.values)
    sums = _dot(x, values.astype(x.dtype), (dims, dims), jnp.float32)
    scale = jnp.reshape(weight.scale, (1,) * (sums.ndim - weight.scale.ndim) + weight.scale.shape)
    return (sums * scale).astype(dtype)


def _streamed(
    x: Array, weight: Array | QuantizedWeight, *, contracted: int, dtype: jnp.dtype
) -> Array:
    # XLA:CPU reads a left operand in place but first copies a right one into another order: so the
    # weight goes left. Without the barriers XLA would swap the operands again.
    batch = x.shape[: x.ndim - contracted]
    few = jnp.reshape(x, (math.prod(batch), *x.shape[len(batch) :]))
    turned = jax.lax.optimization_barrier(jnp.moveaxis(few, 0, -1))
    if isinstance(weight, QuantizedWeight):
        out = _in_blocks(weight, turned, contracted, dtype)
    else:
        sides = tuple(range(-contracted, 0)), tuple(range(contracted))
        out = jax.lax.optimization_barrier(_dot(weight.astype(x.dtype), turned, sides, dtype))
    return jnp.reshape(jnp.moveaxis(out, -1, 0), (*batch, *out.shape[:-1]))


def _in_blocks(weight: QuantizedWeight, turned: Array, contracted: int, dtype: jnp.dtype) -> Array:
    """Returns weight · turned [*in, few] as [*out, few], by blocks of outputs that fit a core's
    cache. XLA:CPU multiplies floats only: a whole converted weight would go to memory and back."""
    out_shape = weight.scale.shape
    num_in = math.prod(turned.shape[:contracted])
    turned, values = _in_step(jnp.reshape(turned, (num_in, -1)), weight.values)
    values = jnp.reshape(values, (-1, num_in))
    num_out = values.shape[0]
    size = min(values.shape[0], max(1, BLOCK // num_in))

    def one_block(i: Array, sums: Array) -> Array:
        # An incomplete last block starts earlier: slice and update clamp their start alike.
        block = jax.lax.dynamic_slice_in_dim(values, i * size, size).astype(turned.dtype)
        product = jax.lax.optimization_barrier(_dot(block, turned, ((1,), (0,)), jnp.float32))
        return jax.lax.dynamic_update_slice_in_dim(sums, product, i * size, axis=0)

    sums = jnp.zeros((num_out, turned.shape[1]), jnp.float32)
    sums = jax.lax.fori_loop(0, -(-num_out // size), one_block, sums)
    scaled = (sums * jnp.reshape(weight.scale, (-1, 1))).astype(dtype)
    return jnp.reshape(scaled, (*out_shape, -1))


def _in_step(x: Array, values: Array) -> tuple[Array, Array]:
    # Ties the values to x, which changes: else XLA would convert them once before a loop over
    # steps, and read the larger converted values in each step.
    return jax.lax.optimization_barrier((x, values))


def _dot(
    x: Array, y: Array, contracted: tuple[tuple[int, ...], tuple[int, ...]], dtype: jnp.dtype
) -> Array:
    of_x, of_y = (
        tuple(dim % array.ndim for dim in dims)
        for array, dims in zip((x, y), contracted, strict=True)
    )
    return jax.lax.dot_general(x, y, ((of_x, of_y), ((), ())), preferred_element_type=dtype)


def rms_norm(x: Float[Array, "... dim"], scale: Float[Array, " dim"], eps: float) -> Array:
    """Returns x / sqrt(mean(x²) + ε) · scale (arXiv 1910.07467). The quotient is float32, then cast
    to x's dtype."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    # `scale` is multiplied after the cast, as the published checkpoints were trained.
    return jnp.reshape(scale, (1,) * (x.ndim - 1) + scale.shape).astype(x.dtype) * normed.astype(
        x.dtype
    )


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Returns the radians per position of each rotary pair, float64[head_dim / 2].

    Reference: arXiv 2104.09864, §3.4.2."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    if config.rope_scaling is None:
        return frequencies
    return _stretch_low_frequencies(frequencies, config.rope_scaling)


def _stretch_low_frequencies(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Returns frequencies as in Llama 3.1: low ones divided by `factor`, high ones kept, and a
    linear blend between them."""
    rotations = scaling.original_max_position * frequencies / (2 * math.pi)
    blend = (rotations - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blend = np.clip(blend, 0.0, 1.0)
    return blend * frequencies + (1.0 - blend) * frequencies / scaling.factor


def angles(positions: Int[Array, "rows length"], frequencies: np.ndarray) -> Rotation:
    """Returns cosine and sine of each rotary pair's angle at each position, for all layers."""
    radians = (
        positions[..., None].astype(jnp.float32)
        * jnp.asarray(frequencies, jnp.float32)[None, None, :]
    )
    # Else XLA:CPU fuses sine and cosine into their users, and computes them in each layer and head.
    cos, sin = jax.lax.optimization_barrier((jnp.cos(radians), jnp.sin(radians)))
    return Rotation(cos, sin)


def rotate(
    x: Float[Array, "rows length *heads head_dim"],
    rotation: Rotation,
) -> Array:
    """Returns x rotated by its positions (RoPE). As in Hugging Face's models, value i of a head is
    paired with value i + head_dim / 2."""
    cos, sin = (
        jnp.reshape(part, part.shape[:2] + (1,) * (x.ndim - 3) + part.shape[-1:])
        for part in rotation
    )
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def attend(
    queries: Float[Array, "rows length kv_heads queries_per_kv head_dim"],
    keys: Float[Array, "rows kv_heads context head_dim"],
    values: Float[Array, "rows kv_heads context head_dim"],
    positions: Int[Array, "rows length"],
) -> Float[Array, "rows length kv_heads queries_per_kv head_dim"]:
    """Returns softmax attention; the query at position p sees the keys 0 … p."""
    column = jnp.arange(keys.shape[2])[None, None, :]
    return attend_where(queries, keys, values, column <= positions[:, :, None])


def attention_scores(
    queries: Float[Array, "rows length kv_heads queries_per_kv head_dim"],
    keys: Float[Array, "rows kv_heads context head_dim"],
) -> Float[Array, "rows kv_heads queries_per_kv length context"]:
    """Returns q · k / √(head_dim) in float32, for each query q and key k."""
    scores = jnp.einsum("btkgd,bksd->bkgts", queries, keys, preferred_element_type=jnp.float32)
    return scores * queries.shape[-1] ** -0.5


def attend_where(
    queries: Float[Array, "rows length kv_heads queries_per_kv head_dim"],
    keys: Float[Array, "rows kv_heads context head_dim"],
    values: Float[Array, "rows kv_heads context head_dim"],
    visible: Bool[Array, "rows length context"],
) -> Float[Array, "rows length kv_heads queries_per_kv head_dim"]:
    """Returns softmax attention of each query to its `visible` keys; it must have at least one."""
    scores = jnp.where(visible[:, None, None, :, :], attention_scores(queries, keys), MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    return jnp.einsum("bkgts,bksd->btkgd", weights, values)


def sees(
    turn: Int[Array, "*shape"],
    column: Int[Array, "*shape"],
    start: Int[Array, "*shape"],
    trunk: Int[Array, "*shape"] | None,
) -> Bool[Array, "*shape"]:
    """Whether query number `turn` of a row sees the key in column `column` of the row's cache.

    Args:
      start: column of the row's first query.
      trunk: number of queries after the first that form the trunk, or None if no row has a branch.
        Later queries form a branch, which continues the first query and does not see the trunk.
    """
    is_before = column <= start + turn
    if trunk is None:
        return is_before
    return is_before & ((turn <= trunk) | (column <= start) | (column > start + trunk))


@jax.custom_vjp
def swiglu(
    gate: Float[Array, "*batch mlp"], up: Float[Array, "*batch mlp"]
) -> Float[Array, "*batch mlp"]:
    """Returns silu(gate) ⊙ up (arXiv 2002.05202). The backward pass keeps only `gate` and `up`."""
    return jax.nn.silu(gate) * up


def _swiglu_forward(gate: Array, up: Array) -> tuple[Array, tuple[Array, Array]]:
    return swiglu(gate, up), (gate, up)


def _swiglu_backward(kept: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    gate, up = kept
    # Both results end with a division by 1 / sigmoid(gate). XLA:CPU computes what ends in a
    # division once. What ends cheaply it recomputes in each product that reads it; in the product
    # for the weights' gradient in an order that misses caches (seen to take as long as it).
    inverse = 1 + jnp.exp(-gate)
    to_gate = grad * up * (1 + gate * (1 - 1 / inverse)) / inverse
    return to_gate, grad * gate / inverse


swiglu.defvjp(_swiglu_forward, _swiglu_backward)


def exit_hidden(
    hidden: Float[Array, "*batch embed"], head: ExitHead
) -> Float[Array, "*batch embed"]:
    """Returns hidden + head · hidden, the input of the policy's output head.

    Args:
      hidden: output of the early layer, after the policy's final norm.
    """
    return hidden + linear(hidden, head)
