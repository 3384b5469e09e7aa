"""Makes parameters: their initial values and the names of their axes."""

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

Initializer = Callable[[jax.Array, tuple[int, ...], jnp.dtype], Array]


class Keys:
    """One random key for each parameter, in the order in which parameters are made.

    This is a plain counter: tracing the writes of `nnx.Rngs` takes time quadratic in the number of
    layers.
    """

    def __init__(self, key: jax.Array):
        self._key = key
        self._num_used = 0

    def next(self) -> jax.Array:
        self._num_used += 1
        return jax.random.fold_in(self._key, self._num_used)


def param(
    keys: Keys,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    init: Initializer,
    *,
    contracted: int = 0,
) -> nnx.Param:
    """Returns a new parameter with its axis names and initializer as metadata.

    Args:
      contracted: number of trailing dimensions that a linear layer sums over, or 0 if this is not
        the weight of a linear layer. Only such weights may be quantized.
    """
    value = init(keys.next(), shape, jnp.float32)
    return nnx.Param(value, axes=axes, init=init, contracted=contracted)


ones = jax.nn.initializers.ones
zeros = jax.nn.initializers.zeros


@lru_cache
def normal(fan_in: int, num_residuals: int = 1) -> Initializer:
    """Returns an initializer for normal values of standard deviation 1/√(fan_in · num_residuals).

    Sums over the inputs, and over layers that write to the residual stream, then start at unit
    scale. The initializer is cached, so that equal configurations make equal trees."""
    return jax.nn.initializers.normal((fan_in * num_residuals) ** -0.5)


@lru_cache
def orthonormal(scale: float) -> Initializer:
    """Returns a cached initializer for random matrices. Their rows, or columns if these are fewer,
    are orthogonal and of length `scale`."""
    return jax.nn.initializers.orthogonal(scale)


@lru_cache
def padded(init: Initializer, unpadded: tuple[int, ...]) -> Initializer:
    """Returns a cached initializer that fills the part of shape `unpadded` by `init`, and the
    padding after it with zeros."""

    def make(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        if shape == unpadded:
            return init(key, shape, dtype)
        behind = [(0, whole - part) for whole, part in zip(shape, unpadded, strict=True)]
        return jnp.pad(init(key, unpadded, dtype), behind)

    return make
