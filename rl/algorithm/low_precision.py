"""Stores an optimizer's state, and weights, in fewer bits than computations on them use.

Knows trees of arrays and optax. Does not know which optimizer it is.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

_SEED = 0x5EED  # seed of the rounding's random draws, combined with the update's number


class KeptState(NamedTuple):
    inner: optax.OptState  # state of the wrapped optimizer, its float32 arrays kept in bfloat16
    count: Int[Array, ""]  # number of updates so far, which seeds the next one's rounding


def kept_in_bfloat16(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Returns `inner` with its float32 state kept in bfloat16, rounded stochastically.

    Rounding to nearest drops changes below half of a value's last bit: a moment that decays by
    0.1 % per step would never change. Stochastic rounding is right on average (Gupta et al. 2015,
    https://arxiv.org/abs/1502.02551, section 3.1).
    """
    exact = optax.with_extra_args_support(inner)

    def init(params: Any) -> KeptState:
        state = exact.init(params)
        return KeptState(_cast(state, jnp.float32, jnp.bfloat16), jnp.zeros((), jnp.int32))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, KeptState]:
        before = in_float32(state.inner)
        updates, after = exact.update(updates, before, params, **extra)
        key = jax.random.fold_in(jax.random.key(_SEED), state.count)
        return updates, KeptState(rounded_like(state.inner, after, key), state.count + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def round_stochastically(x: Float[Array, "*shape"], key: Key[Array, ""]) -> Float[Array, "*shape"]:
    """Returns float32 values, each rounded to one of the two neighbouring bfloat16 values.

    The nearer neighbour is likelier, so that the mean is the value itself. Values that bfloat16 can
    represent, and values that are not finite, do not change."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    drawn = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    # bfloat16 is the upper half of a float32. Adding a uniform 16-bit draw to the lower half
    # carries with a chance proportional to the lower half.
    upper = ((bits + drawn) >> 16).astype(jnp.uint16)
    rounded = jax.lax.bitcast_convert_type(upper, jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def rounded_like(kept: Any, tree: Any, key: Key[Array, ""]) -> Any:
    """Returns `tree` with arrays rounded stochastically to bfloat16 if those of `kept` have it."""
    leaves, structure = jax.tree.flatten(tree)
    rounded = [
        round_stochastically(x, jax.random.fold_in(key, i)) if like.dtype == jnp.bfloat16 else x
        for i, (x, like) in enumerate(zip(leaves, jax.tree.leaves(kept), strict=True))
    ]
    return jax.tree.unflatten(structure, rounded)


def in_float32(tree: Any) -> Any:
    """Returns `tree` with bfloat16 arrays converted to float32, which is exact."""
    return _cast(tree, jnp.bfloat16, jnp.float32)


def _cast(tree: Any, from_dtype: DTypeLike, to_dtype: DTypeLike) -> Any:
    return jax.tree.map(lambda x: x.astype(to_dtype) if x.dtype == from_dtype else x, tree)
