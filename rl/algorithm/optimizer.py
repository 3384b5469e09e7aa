"""The optimizer of a run: its learning rate, weight decay, and how its moments are kept.

Knows trees of arrays. Does not know on which devices they are.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from jaxtyping import Array

from pat_jax.rl.algorithm.low_precision import kept_in_bfloat16

Params = Any  # a pytree of float arrays


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
