"""What a model says at each token of one sequence, by its own forward pass: no mesh and no engine."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Params, Policy


def outputs(
    policy: Policy, params: Params, tokens: Sequence[int] | np.ndarray, longest: int = 128
) -> np.ndarray:
    """Float64: the logits at each token, or what a scalar head says there.

    Args:
      longest: all sequences are padded to it, so that one program serves them all; no token sees what
        comes behind it.
    """
    padded = np.zeros(longest, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(_outputs(policy.config, params, padded)[: len(tokens)], np.float64)


@partial(jax.jit, static_argnums=0)
def _outputs(config: ModelConfig, params: Params, tokens: jax.Array) -> jax.Array:
    model = Policy.from_config(config).bind(params)
    hidden, *_ = model(tokens[None], jnp.arange(len(tokens))[None])
    if config.head == "vocab":
        return model.logits(hidden)[0, :, : config.vocab_size]
    weights, bias = model.scalar_head
    return hidden[0] @ weights[0] + (0 if bias is None else bias[0])
