"""Samples tokens by Gumbel-max on two levels, with noise that is the same in every layout.

    m_b = Σ_{v in b} p_v;  block = argmax_b (log m_b + G_b);  token = argmax_{v in block} (log p_v +
    G_v)

The G are independent Gumbel variables, so the token has exactly the distribution p. They depend
only on the position's key, the block and the token's place in its block. Let d be the total
variation distance of two distributions on a level. With the same noise their samples agree there
with probability ≥ (1 - d) / (1 + d) (arXiv 2408.07978). A single level would need noise for the
whole vocabulary.

If each device has whole blocks of the vocabulary, it chooses a token among those, and only these
tokens are sent. The chosen token is the same as on one device: of equals, the first.

Knows logits, temperatures, keys and shards. Knows nothing of penalties, filters or rows that share
a step.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from pat_jax.models.config import VOCAB_BLOCK
from pat_jax.models.partition import Partition

WHOLE = Partition()


def block_width(vocab: int) -> int:
    """Returns the number of tokens of each block of a padded vocabulary of size `vocab`."""
    return max(n for n in range(1, VOCAB_BLOCK + 1) if vocab % n == 0)


def has_whole_blocks(shard: int, num_shards: int) -> bool:
    """Whether no block lies on two shards, of `shard` tokens each."""
    return shard % block_width(shard * num_shards) == 0


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
    partition: Partition = WHOLE,
) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """Samples a token per row from softmax(logits / divisor), or takes the likeliest if greedy.

    In both cases it chooses the block of the vocabulary first, then the token in it. The logits are
    read twice, and no array of their size is written. argmax(log p + G) is argmax(p / E).

    Args:
      logits: whole, or a shard of the vocabulary that has whole blocks.
      keys: see `position_keys`.
      partition: how the vocabulary is split.

    Returns:
      The tokens; log-probabilities in nats, never above 0, NaN where a logit is NaN or infinite.
    """
    blocks, first, num_blocks = _in_blocks(logits, partition)
    _, count, width = blocks.shape
    highest = jnp.max(blocks, axis=-1)
    largest = jnp.max(partition.gather(jnp.max(highest, axis=1, keepdims=True), "vocab"), axis=1)
    masses = jnp.sum(jnp.exp(scaled(blocks, largest, divisor)), axis=-1)
    # XLA:CPU's maximum may pass over a NaN, such as an infinite logit less itself: sums do not.
    total = jnp.sum(masses, axis=-1)
    # Noise of the tokens comes first, because the number of blocks depends on the padding.
    noise = exponentials(keys, width + num_blocks)
    of_blocks = jax.lax.dynamic_slice_in_dim(noise, width + first, count, axis=1)
    is_best = (is_greedy | jnp.isnan(total))[:, None]
    scores = jnp.where(is_best, highest, masses / of_blocks)
    block = jnp.argmax(scores, axis=-1)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    probs = jnp.exp(scaled(inside, _pick(highest, block), divisor))
    place = jnp.argmax(jnp.where(is_best, inside, probs / noise[:, :width]), axis=-1)
    tokens = ((first + block) * width + place).astype(jnp.int32)
    of_shard = _Candidate(_pick(scores, block), tokens, _pick(inside, place), total)
    found = _best_of_shards(of_shard, partition)
    return found.token, scaled(found.logit, largest, divisor) - jnp.log(found.total)


class _Candidate(NamedTuple):
    """The token of each row that is chosen among those of a shard, or of all shards."""

    score: Float[Array, " rows"]  # of its block
    token: Int[Array, " rows"]
    logit: Float[Array, " rows"]
    total: Float[Array, " rows"]  # mass of all tokens among which it is chosen


def _in_blocks(
    logits: Float[Array, "rows shard"], partition: Partition
) -> tuple[Float[Array, "rows blocks width"], Array | int, int]:
    """Returns a shard in blocks, the number of the first of them, and the number of all blocks."""
    num_shards = partition.num_shards("vocab")
    width = block_width(logits.shape[1] * num_shards)
    blocks = jnp.reshape(logits, (logits.shape[0], -1, width))
    count = blocks.shape[1]
    return blocks, partition.shard_index("vocab") * count, num_shards * count


def _best_of_shards(of_shard: _Candidate, partition: Partition) -> _Candidate:
    if partition.num_shards("vocab") == 1:
        return of_shard
    # One collective for all four: float32 holds the number of any token exactly.
    mine = jnp.stack([x.astype(jnp.float32) for x in of_shard], axis=-1)
    every = jnp.reshape(partition.gather(mine, "vocab"), (len(mine), -1, len(of_shard)))
    score, token, logit, total = jnp.unstack(every, axis=-1)
    shard = jnp.argmax(score, axis=1)
    token = _pick(token, shard).astype(jnp.int32)
    return _Candidate(_pick(score, shard), token, _pick(logit, shard), jnp.sum(total, axis=1))


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
