"""From logits to a token: temperature, top-k and nucleus filters, one uniform number a token.

Every option is an array with one entry a row, so that no option compiles anything. The uniform
number of a token is a function of its sequence's key and its position alone: neither the row nor
the device nor the batch that a sequence happens to be in can change what is sampled.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

NEVER = -1e30  # a finite minus infinity


def sequence_key(*ids: int) -> np.ndarray:
    """The sampling key of one sequence, uint32[2], from (seed, stream, iteration, prompt, sample)."""
    return np.random.SeedSequence(ids).generate_state(2, np.uint32)


def uniform(keys: UInt32[Array, "rows 2"], positions: Int[Array, " rows"]) -> Float[Array, " rows"]:
    """One number in [0, 1) for each row, from its key and the position of the token to be drawn."""

    def one(key: Array, position: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), position))

    return jax.vmap(one)(keys, positions)


def sample(
    logits: Float[Array, "rows padded_vocab"],
    numbers: Float[Array, " rows"],
    temperature: Float[Array, " rows"],
    top_k: Int[Array, " rows"],
    top_p: Float[Array, " rows"],
    *,
    vocab_size: int,
) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """Draws a token a row by inverting the cumulative distribution in vocabulary order.

        p = softmax(filter(logits / temperature));  token = min {v : Σ_{u ≤ v} p_u > number}

    Args:
      numbers: uniform in [0, 1).
      temperature: 0 takes the likeliest token.
      top_k: keeps the k likeliest tokens (and ties with the last of them); 0 keeps all.
      top_p: keeps the smallest set of likeliest tokens with at least this mass; 1 keeps all.
      vocab_size: tokens from here on are padding and never drawn.

    Returns:
      The tokens and their log-probabilities in nats under the distribution drawn from; a greedy
      token's under the softmax at temperature 1.
    """
    is_greedy = temperature <= 0
    in_vocab = jnp.arange(logits.shape[-1])[None, :] < vocab_size
    logits = jnp.where(in_vocab, logits.astype(jnp.float32), NEVER)
    scaled = logits / jnp.where(is_greedy, 1.0, temperature)[:, None]
    has_filter = ~is_greedy & ((top_k > 0) | (top_p < 1.0))
    kept = jax.lax.cond(
        jnp.any(has_filter),
        lambda x: jnp.where(has_filter[:, None] & ~_keep(x, top_k, top_p), NEVER, x),
        lambda x: x,
        scaled,
    )
    log_probs = jax.nn.log_softmax(kept, axis=-1)
    probs = jnp.exp(log_probs)
    # A parallel sum is not monotone in its last bits: only a token that can be drawn is a boundary.
    cumulative = jnp.where(probs > 0, jnp.cumsum(probs, axis=-1), 0.0)
    # The last sum is 1 only up to rounding: scale the number, not the sums.
    goal = numbers[:, None] * jnp.max(cumulative, axis=-1, keepdims=True)
    drawn = jnp.argmax(cumulative > goal, axis=-1).astype(jnp.int32)
    tokens = jnp.where(is_greedy, jnp.argmax(logits, axis=-1).astype(jnp.int32), drawn)
    return tokens, jnp.take_along_axis(log_probs, tokens[:, None], axis=-1)[:, 0]


def _keep(scaled: Array, top_k: Array, top_p: Array) -> Array:
    """True at the tokens that survive both filters; the likeliest always does."""
    descending = jnp.sort(scaled, axis=-1, descending=True)
    last = jnp.where(top_k > 0, jnp.minimum(top_k, scaled.shape[-1]), scaled.shape[-1]) - 1
    k_floor = jnp.take_along_axis(descending, last[:, None], axis=-1)
    in_top_k = jnp.where(descending >= k_floor, descending, NEVER)
    probs = jax.nn.softmax(in_top_k, axis=-1)
    mass_before = jnp.cumsum(probs, axis=-1) - probs
    in_nucleus = jnp.where(mass_before < top_p[:, None], descending, jnp.inf)
    p_floor = jnp.min(in_nucleus, axis=-1, keepdims=True)
    return scaled >= jnp.maximum(k_floor, p_floor)
