"""Finds the part of a model where the first NaN or infinity comes up, for debugging."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pat_jax.models.layers import angles, rms_norm, rope_frequencies
from pat_jax.models.partition import Whole
from pat_jax.models.policy import Params, Policy


def where_nans_start(
    policy: Policy, params: Params, tokens: np.ndarray, dtype: jnp.dtype
) -> str | None:
    """Names the first part of the model whose output for `tokens`, int[length], is not finite.

    Runs the model layer by layer, without a cache; compiles for this length. Returns None if every
    output is finite.
    """

    def run(params: Params, tokens: Array) -> Array:
        model, positions = policy.bind(params), jnp.arange(tokens.shape[1])[None, :]
        x = jnp.take(model.embedding[...], tokens, axis=0).astype(dtype)
        rotation = angles(positions, rope_frequencies(policy.config))
        outputs = [x]
        for layer in model.layers:
            x = layer(x, positions, rotation, None, tokens >= 0, None, Whole())[0]
            outputs.append(x)
        outputs.append(rms_norm(x, model.final_norm[...], policy.config.norm_eps))
        outputs.append(model.logits(outputs[-1]))
        return jnp.stack([jnp.isfinite(output).all() for output in outputs])

    is_sound = np.asarray(jax.jit(run)(params, np.asarray(tokens, np.int32)[None, :]))
    layers = [f"layer {i}" for i in range(policy.config.num_layers)]
    parts = ["the embedding", *layers, "the final norm", "the output head"]
    return next((part for part, sound in zip(parts, is_sound, strict=True) if not sound), None)
