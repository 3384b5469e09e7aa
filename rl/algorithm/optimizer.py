"""The optimizer of a run: its learning rate, weight decay, and how its moments are kept.

Weights and moments may be stored in fewer bits than computations on them use. Knows trees of
arrays. Does not know on which devices they are.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int, Key

_SEED = 0x5EED  # seed of the rounding's random draws, combined with the update's number
Params = Any  # a pytree of float arrays


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


def make_schedule(
    *,
    learning_rate: float,
    schedule: Literal["constant", "cosine"],
    warmup_steps: int,
    total_steps: int,
) -> Callable[[ArrayLike], Array | np.floating]:
    """Returns a function that gives the learning rate of update number `step`, from 0.

        rate = learning_rate * min(1, (step + 1) / warmup_steps) * decay
        decay = 1                                                            "constant"
        decay = (1 + cos(π (step - warmup) / (total - warmup))) / 2          "cosine"

    The rates at a warm-up's first update and at a cosine's last one are small but not 0. A rate is
    computed where `step` is: on the host or on devices.
    """

    def rate(count: ArrayLike) -> Array | np.floating:
        # NumPy on the host, where nothing is compiled.
        np_: Any = jnp if isinstance(count, jax.Array) else np
        step = np_.asarray(count, float)
        warm_up = np_.minimum(1.0, (step + 1.0) / max(warmup_steps, 1))
        progress = np_.clip((step - warmup_steps) / max(total_steps - warmup_steps, 1), 0.0, 1.0)
        decay = 0.5 * (1.0 + np_.cos(np.pi * progress)) if schedule == "cosine" else 1.0
        return learning_rate * warm_up * decay

    return rate


def make_optimizer(
    *,
    learning_rate: float,
    total_steps: int,
    schedule: Literal["constant", "cosine"] = "constant",
    warmup_steps: int = 0,
    weight_decay: float = 0.0,
    b1: float = 0.9,
    b2: float = 0.95,
    max_grad_norm: float = 1.0,
    moment_dtype: Literal["float32", "bfloat16"] = "float32",
) -> optax.GradientTransformation:
    """Returns global-norm clipping followed by AdamW without weight decay of norms and biases.

    Args:
      moment_dtype: dtype of both moments; bfloat16 is rounded stochastically.
    """
    rate = make_schedule(
        learning_rate=learning_rate,
        schedule=schedule,
        warmup_steps=warmup_steps,
        total_steps=total_steps,
    )
    adamw = optax.adamw(rate, b1=b1, b2=b2, weight_decay=weight_decay, mask=decay_mask)
    if moment_dtype == "bfloat16":
        adamw = kept_in_bfloat16(adamw)
    return optax.chain(optax.clip_by_global_norm(max_grad_norm), adamw)


def decay_mask(params: Params) -> Params:
    """Returns True for parameters with weight decay: neither 1-D nor named `…norm` or `…bias`. The
    names are needed because a bias may have an axis for its heads."""

    def is_decayed(path: tuple, x: Array) -> bool:
        words = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        return x.ndim > 1 and not any(word.endswith(("norm", "bias")) for word in words)

    return jax.tree_util.tree_map_with_path(is_decayed, params)
