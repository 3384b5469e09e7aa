"""Eight-bit weights for the rollout's copy of a policy.

Linear layers are quantized weight-only: values are int8 or float8_e4m3fn, with one float32 scale
per output. A weight is values · scale, and a product x · valuesᵀ is scaled once, after its sum. All
inputs of an output share its scale. So if a layout splits the inputs, the partial sums on all
shards have the same scale.

The embedding and the output head are not quantized, as in vLLM, SGLang and torchao: errors of the
head are errors of the logits, and an embedding lookup reads little. Norms and biases are not
quantized either.
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
    """The weight values · scale. Both may also be shapes, axis names or shardings, not arrays."""

    values: Num[Array, "..."]  # [*out, *in]
    scale: Float[Array, "..."]  # [*out]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


def abstract_weight(
    shape: tuple[int, ...], contracted: int, weights: WeightFormat
) -> jax.ShapeDtypeStruct | QuantizedWeight:
    """Returns the shape of a parameter in the format `weights`; float32 if it is not quantized.

    Args:
      contracted: number of trailing dimensions that a linear layer sums over, or 0 for a parameter
        that is not the weight of a linear layer and not quantized.
    """
    if weights == "auto" or not contracted:
        return jax.ShapeDtypeStruct(shape, jnp.float32)
    values: Any = jax.ShapeDtypeStruct(shape, _DTYPES[weights])
    scale: Any = jax.ShapeDtypeStruct(shape[:-contracted], jnp.float32)
    return QuantizedWeight(values, scale)


def quantize(weight: Float[Array, "..."], like: QuantizedWeight) -> QuantizedWeight:
    """Returns a weight [*out, *in] quantized to the nearest values, in the shapes of `like`.

    Scales map each output's largest magnitude to the format's largest value. The error is at most
    half a step: scale / 2 in int8, 1/16 of a weight (or scale / 1024) in fp8. Only maxima and
    quotients are computed, so the result does not depend on the sharding. A weight that is not
    finite makes its whole output not finite.
    """
    dtype = like.values.dtype
    num_outputs = len(like.scale.shape)
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
    """Returns a float32 parameter in the format of `like`: in `dtype`, or quantized. One that is
    already quantized is returned unchanged."""
    if isinstance(weight, QuantizedWeight):
        return weight
    return quantize(weight, like) if isinstance(like, QuantizedWeight) else weight.astype(dtype)


@lru_cache
def quantizer(
    like: QuantizedWeight, shardings: QuantizedWeight | None
) -> Callable[[Array], QuantizedWeight]:
    """Returns `quantize` as a compiled function whose results have `shardings`."""
    return jax.jit(lambda weight: quantize(weight, like), out_shardings=shardings)


def is_quantized(node: object) -> bool:
    return isinstance(node, QuantizedWeight)
