"""Samples tokens by Gumbel-max on two levels, with noise that is the same in every layout.

    m_b = Σ_{v in b} p_v;  block = argmax_b (log m_b + G_b);  token = argmax_{v in block} (log p_v +
    G_v)

The G are independent Gumbel variables, so the token has exactly the distribution p. They depend
only on the position's key, the block and the token's place in its block. Let d be the total
variation distance of two distributions on a level. With the same noise their samples agree there
with probability ≥ (1 - d) / (1 + d) (arXiv 2408.07978). A single level would need noise for the
whole vocabulary.

Knows logits, temperatures and keys. Knows nothing of penalties, filters or rows that share a step.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

BLOCK = 128  # most tokens of a block; the padded vocabulary is a multiple of it


def position_keys(
    keys: UInt32[Array, "rows 2"], positions: Int[Array, " rows"]
) -> UInt32[Array, "rows 2"]:
    """Returns the noise key of each row, from its sequence's key and the token's position."""

    def one(key: Array, position: Array) -> Array:
        return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key), position))

    return jax.vmap(one)(keys, positions)


def exponentials(keys: UInt32[Array, "rows 2"], count: int) -> Float[Array, "rows count"]:
    """Returns exponential variables E of mean 1; -log E are Gumbel variables.

    The i-th depends only on key and i. The smallest value is 2**-33: a token with less than 1e-9 of
    the largest mass is practically never drawn.
    """

    def bits(key: Array) -> Array:
        return jax.random.bits(jax.random.wrap_key_data(key), (count,), jnp.uint32)

    # Uniform in (0, 1), finest near 0, where an unlikely token wins; no value is rounded to 1.
    number = jax.vmap(bits)(keys).astype(jnp.float32) * 2.0**-32 + 2.0**-33
    return -jnp.log1p(-jnp.minimum(number, 1 - 2.0**-24))


def draw(
    logits: Float[Array, "rows vocab"],
    divisor: Float[Array, " rows"],
    keys: UInt32[Array, "rows 2"],
    is_greedy: Bool[Array, " rows"],
) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """Samples a token per row from softmax(logits / divisor), or takes the likeliest if greedy.

    In both cases it chooses the block of the vocabulary first, then the token in it. The logits are
    read twice, and no array of their size is written. argmax(log p + G) is argmax(p / E).

    Args:
      keys: see `position_keys`.

    Returns:
      The tokens; log-probabilities in nats, never above 0, NaN where a logit is NaN or infinite.
    """
    width = max(n for n in range(1, BLOCK + 1) if logits.shape[1] % n == 0)
    blocks = jnp.reshape(logits, (logits.shape[0], -1, width))
    highest = jnp.max(blocks, axis=-1)
    largest = jnp.max(highest, axis=-1)
    masses = jnp.sum(jnp.exp(scaled(blocks, largest, divisor)), axis=-1)
    # XLA:CPU's maximum may pass over a NaN, such as an infinite logit less itself: sums do not.
    total = jnp.sum(masses, axis=-1)
    # Noise of the tokens comes first, because the number of blocks depends on the padding.
    noise = exponentials(keys, width + blocks.shape[1])
    is_best = (is_greedy | jnp.isnan(total))[:, None]
    block = jnp.argmax(jnp.where(is_best, highest, masses / noise[:, width:]), axis=-1)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    probs = jnp.exp(scaled(inside, _pick(highest, block), divisor))
    place = jnp.argmax(jnp.where(is_best, inside, probs / noise[:, :width]), axis=-1)
    logprobs = scaled(_pick(inside, place), largest, divisor) - jnp.log(total)
    return (block * width + place).astype(jnp.int32), logprobs


def log_prob(
    logits: Float[Array, "rows vocab"], divisor: Float[Array, " rows"], tokens: Int[Array, " rows"]
) -> Float[Array, " rows"]:
    """Returns the log-probability of each row's token under softmax(logits / divisor), in nats."""
    largest = jnp.max(logits, axis=-1)
    total = jnp.sum(jnp.exp(scaled(logits, largest, divisor)), axis=-1)
    return scaled(_pick(logits, tokens), largest, divisor) - jnp.log(total)


def scaled(
    logits: Float[Array, "rows ..."], largest: Float[Array, " rows"], divisor: Float[Array, " rows"]
) -> Float[Array, "rows ..."]:
    """Returns (logits - largest) / divisor, which is exactly 0 for the largest logit.

    If both were divided first, XLA could fuse one quotient with the difference. The two quotients
    would then differ by up to 1e-7 of their size: at a temperature of 1e-6 by more than a nat.
    """
    shape = (-1, *[1] * (logits.ndim - 1))
    return (logits - jnp.reshape(largest, shape)) / jnp.reshape(divisor, shape)


def _pick(x: Float[Array, "rows columns"], column: Int[Array, " rows"]) -> Float[Array, " rows"]:
    return jnp.take_along_axis(x, column[:, None], axis=-1)[:, 0]
