"""Weights in eight bits, for a copy that only generates.

Weight-only quantization of linear layers: values in int8 or float8_e4m3fn and a float32 scale for
each output, so that a weight is values · scale and a product x · valuesᵀ is scaled once, after its
sum. A scale belongs to all inputs of its output: where a layout splits the inputs, the partial sums
of its shards have the same scale.

The embedding and the output head stay as they are, as vLLM, SGLang and torchao leave them: errors
of the head are errors of the logits, and looking up a row reads little. So do norms and biases.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from pat_jax.common.pytree import pytree_dataclass

WeightFormat = Literal["auto", "int8", "fp8"]  # auto: nothing is quantized

_LARGEST = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0}
_DTYPES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}


@pytree_dataclass
class QuantizedWeight:
    """values · scale. Its two leaves may be shapes, axis names or shardings as well as arrays."""

    values: Num[Array, "..."]  # [*out, *in]
    scale: Float[Array, "..."]  # [*out]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


def abstract_weight(
    shape: tuple[int, ...], contracted: int, weights: WeightFormat
) -> jax.ShapeDtypeStruct | QuantizedWeight:
    """The shape of a parameter kept in `weights`; float32 where that does not quantize it.

    Args:
      contracted: trailing dimensions that the product of a linear layer sums over; 0: of none.
    """
    if weights == "auto" or not contracted:
        return jax.ShapeDtypeStruct(shape, jnp.float32)
    values: Any = jax.ShapeDtypeStruct(shape, _DTYPES[weights])
    scale: Any = jax.ShapeDtypeStruct(shape[:-contracted], jnp.float32)
    return QuantizedWeight(values, scale)


def quantize(weight: Float[Array, "..."], like: QuantizedWeight) -> QuantizedWeight:
    """The nearest values of a weight[*out, *in], with scales that make the largest magnitude of an
    output the largest value.

    Off by half a step at most: scale / 2 in int8, 1/16 of a weight (or scale / 1024) in fp8. Takes
    maxima and quotients only: whatever is split, the same numbers come out. A weight that is not
    finite leaves no output that is.
    """
    dtype, num_outputs = like.values.dtype, len(like.scale.shape)
    inputs = tuple(range(num_outputs, weight.ndim))
    weight = weight.astype(jnp.float32)
    largest = jnp.max(jnp.abs(weight), axis=inputs, keepdims=True)
    scale = largest / _LARGEST[dtype]
    values = weight / jnp.where(scale > 0, scale, 1)
    if jnp.issubdtype(dtype, jnp.integer):
        values = jnp.round(values)
    return QuantizedWeight(values.astype(dtype), jnp.squeeze(scale, inputs))


def stored(
    weight: Float[Array, "..."] | QuantizedWeight,
    like: jax.ShapeDtypeStruct | QuantizedWeight,
    dtype: jnp.dtype,
) -> Array | QuantizedWeight:
    """A float32 parameter as it is kept: in `dtype`, or quantized like `like`; one that is
    quantized already as it is."""
    if isinstance(weight, QuantizedWeight):
        return weight
    return quantize(weight, like) if isinstance(like, QuantizedWeight) else weight.astype(dtype)


@lru_cache
def quantizer(
    like: QuantizedWeight, shardings: QuantizedWeight | None
) -> Callable[[Array], QuantizedWeight]:
    """`quantize`, compiled, onto `shardings`."""
    return jax.jit(lambda weight: quantize(weight, like), out_shardings=shardings)


def is_quantized(node: object) -> bool:
    return isinstance(node, QuantizedWeight)
