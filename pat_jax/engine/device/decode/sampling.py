"""Samples tokens from logits: penalties, temperature, filters and Gumbel noise (`gumbel.py`).

Every option is an array with one entry per row, so that no option causes a compilation. A token's
noise depends only on its sequence's key and its position. Row, device and batch of a sequence
cannot change what is sampled.

If any row has an option, another branch samples all rows. Its probabilities are the same up to
rounding, so that a row without options may get another token at a near-tie. That branch gathers the
logits of all shards of the vocabulary; without options, each device draws from its own shard.

A NaN logit makes every log-probability of its row NaN, whatever the options are: filters are
written so that a NaN survives them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from pat_jax.engine.device.decode.gumbel import WHOLE, draw, log_prob, scaled
from pat_jax.engine.sequences.types import RowSampling
from pat_jax.models.partition import Partition

NEG_INF = -1e30  # a finite number in place of minus infinity

Keys = UInt32[Array, "rows 2"]  # of the noise of each token, see `gumbel.position_keys`
# Sets of tokens in prompt and response, and in the response alone, see `types.token_set`.
Seen = UInt32[Array, "rows 2 words"]


class Ahead(NamedTuple):
    """What penalties need for tokens that are sampled behind draft tokens not yet accepted. Several
    of them share a row of `Seen`."""

    row: Int[Array, " rows"]  # the row of `Seen` for each sampled token
    # The draft tokens before each sampled token, which count as its response; negative: none.
    num_generated: Int[Array, "rows few"]


def sequence_key(*ids: int) -> np.ndarray:
    """Returns a sequence's sampling key, uint32[2], from (seed, stream, iteration, prompt, …)."""
    return np.random.SeedSequence(ids).generate_state(2, np.uint32)


def sample(
    logits: Float[Array, "rows padded_vocab"],
    keys: Keys,
    options: RowSampling,
    seen: Seen,
    forbidden: Int[Array, "rows some"],
    ahead: Ahead | None = None,
    *,
    vocab_size: int,
    partition: Partition = WHOLE,
) -> tuple[Int[Array, " rows"], Float[Array, " rows"], Float[Array, " rows"]]:
    """Samples a token per row from softmax(filter(penalize(logits)) / temperature).

    Args:
      seen: the tokens that penalties apply to; a row without penalties may hold anything.
      forbidden: tokens that may not be drawn now; negative ones stand for none.
      vocab_size: token ids from this number on are padding and never drawn.
      partition: splits the vocabulary of `logits` into shards that have whole blocks.

    Returns:
      The tokens, and their log-probabilities (see `draw`): under the distribution drawn from, and
      under softmax(logits / temperature), the policy that a trainer knows; greedy: temperature 1.
    """
    is_greedy = options.temperature <= 0
    divisor = jnp.where(is_greedy, 1.0, options.temperature)
    is_changed = _has_option(options, is_greedy) | jnp.any(forbidden >= 0, axis=1)

    def plain(logits: Array) -> tuple[Array, Array, Array]:
        own = _in_vocab(logits, vocab_size, partition)
        tokens, logprobs = draw(own, divisor, keys, is_greedy, partition)
        return tokens, logprobs, logprobs

    def changed(logits: Array) -> tuple[Array, Array, Array]:
        logits = _in_vocab(partition.gather(logits, "vocab"), vocab_size)
        allowed = _forbid(_penalize(logits, options, seen, ahead), forbidden)
        tokens, logprobs = draw(_filter(allowed, divisor, options), divisor, keys, is_greedy)
        return tokens, logprobs, jnp.where(is_changed, log_prob(logits, divisor, tokens), logprobs)

    # Whole branches return a few numbers per row: arrays as large as the logits would be copied.
    return jax.lax.cond(jnp.any(is_changed), changed, plain, logits)


def likeliest(
    logits: Float[Array, "rows padded_vocab"],
    wanted: Bool[Array, " rows"],
    *,
    count: int,
    vocab_size: int,
    partition: Partition = WHOLE,
) -> tuple[Int[Array, "rows count"], Float[Array, "rows count"]]:
    """Returns the model's likeliest tokens and their log-probabilities, the likeliest first.

    Penalties, temperature and filters are not applied. Returns zeros if no row wants these tokens.
    """
    shape = (logits.shape[0], count)

    def find(logits: Array) -> tuple[Array, Array]:
        whole = _in_vocab(partition.gather(logits, "vocab"), vocab_size)
        log_probs = jax.nn.log_softmax(whole, axis=-1)
        top, tokens = jax.lax.top_k(log_probs, count)
        return tokens.astype(jnp.int32), top

    def nothing(logits: Array) -> tuple[Array, Array]:
        del logits
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    return jax.lax.cond(jnp.any(wanted), find, nothing, logits) if count else nothing(logits)


def remember(seen: Seen, tokens: Int[Array, "rows some"], is_new: Bool[Array, "rows some"]) -> Seen:
    """Returns `seen` with each row's new `tokens` added to its text and to its response."""
    rows = jnp.arange(seen.shape[0])[:, None]
    words = tokens // 32
    bits = jnp.uint32(1) << (tokens % 32).astype(jnp.uint32)
    # Adding bits gives their union only if each comes once: only the first of equal tokens counts.
    is_same = (tokens[:, :, None] == tokens[:, None]) & is_new[:, None]
    is_first = is_new & (jnp.argmax(is_same, axis=2) == jnp.arange(tokens.shape[1])[None])
    known = seen[rows, :, words]
    more = jnp.where(is_first[:, :, None], bits[:, :, None] & ~known, jnp.uint32(0))
    return seen.at[rows, :, words].add(more)


def _in_vocab(logits: Array, vocab_size: int, partition: Partition = WHOLE) -> Array:
    """Returns float32 logits with NEG_INF for padding."""
    logits = logits.astype(jnp.float32)
    shard = logits.shape[-1]
    if vocab_size == shard * partition.num_shards("vocab"):
        return logits
    tokens = partition.shard_index("vocab") * shard + jnp.arange(shard)
    return jnp.where(tokens[None, :] < vocab_size, logits, NEG_INF)


def _penalize(logits: Array, options: RowSampling, seen: Seen, ahead: Ahead | None) -> Array:
    """Applies penalties; rows without a penalty keep exactly their logits."""
    if ahead is not None:  # packed words are repeated, not bits: a TPU lacks room for the bits
        seen = seen[ahead.row]
    in_text, in_response = (_unpack(seen[:, i], logits.shape[-1]) for i in (0, 1))
    if ahead is not None:
        is_ahead = _any_of(ahead.num_generated, logits.shape[-1])
        in_text, in_response = in_text | is_ahead, in_response | is_ahead
    factor = jnp.where(in_text, options.repetition_penalty[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    return logits - jnp.where(in_response, options.presence_penalty[:, None], 0.0)


def _unpack(words: UInt32[Array, "rows words"], length: int) -> Bool[Array, "rows length"]:
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None, :]) & 1
    return jnp.reshape(bits, (words.shape[0], -1))[:, :length] > 0


def _forbid(logits: Array, forbidden: Int[Array, "rows some"]) -> Array:
    is_forbidden = _any_of(forbidden, logits.shape[-1])
    return jnp.where(is_forbidden & ~jnp.isnan(logits), NEG_INF, logits)


def _any_of(tokens: Int[Array, "rows some"], vocab: int) -> Bool[Array, "rows vocab"]:
    return jnp.any(jnp.arange(vocab)[None, :, None] == tokens[:, None, :], axis=-1)


def _has_option(options: RowSampling, is_greedy: Bool[Array, " rows"]) -> Bool[Array, " rows"]:
    """Whether each row has a penalty or a filter."""
    has_penalty = (options.repetition_penalty != 1) | (options.presence_penalty != 0)
    has_filter = ~is_greedy & (_is_cut(options) | (options.min_p > 0))
    return has_penalty | has_filter


def _is_cut(options: RowSampling) -> Bool[Array, " rows"]:
    """Whether each row has top-k or top-p."""
    return (options.top_k > 0) | (options.top_p < 1.0)


def _filter(logits: Array, divisor: Array, options: RowSampling) -> Array:
    """The logits, with NEG_INF for tokens that top-k, top-p or min-p drop in non-greedy rows."""
    is_sampled = options.temperature > 0
    is_cut = is_sampled & _is_cut(options)
    kept = jax.lax.cond(
        jnp.any(is_cut),
        lambda x: jnp.where(is_cut[:, None] & (x < _floor(x, divisor, options)), NEG_INF, x),
        lambda x: x,
        logits,
    )
    # The likeliest token survives top-k and top-p, so min-p compares with it without a new sum.
    below = scaled(logits, jnp.max(logits, axis=-1), divisor)
    is_low = below < jnp.log(options.min_p)[:, None]
    return jnp.where(is_sampled[:, None] & is_low, NEG_INF, kept)


def _floor(logits: Array, divisor: Array, options: RowSampling) -> Float[Array, "rows 1"]:
    """The smallest logit that survives top-k and top-p; the largest always does.

    Equally likely tokens survive together or not at all.
    """
    largest = jnp.max(logits, axis=-1)
    has_k = options.top_k > 0
    has_p = options.top_p < 1.0
    k_floor = _highest_level(logits, 1.0, options.top_k.astype(jnp.float32), has_k)
    probs = jnp.where(logits < k_floor, 0.0, jnp.exp(scaled(logits, largest, divisor)))
    p_floor = _highest_level(logits, probs, options.top_p * jnp.sum(probs, axis=-1), has_p)
    return jnp.minimum(jnp.maximum(k_floor, p_floor), largest[:, None])


def _highest_level(
    logits: Float[Array, "rows vocab"],
    weights: Float[Array, "rows vocab"] | float,
    goal: Float[Array, " rows"],
    is_wanted: Bool[Array, " rows"],
) -> Float[Array, "rows 1"]:
    """The highest level with Σ_{logit ≥ level} weight ≥ goal; -inf if not wanted, or there is none.

    Nothing is sorted: a sort of the vocabulary is slow, and takes a TPU's compiler as long as all the
    rest of a decode step. Floats are numbered in their order instead, and the number of the level is
    found bit by bit, with one sum over the vocabulary per bit.

    Rounding: every sum of a row adds in the same order, and a rounded sum is monotone in its terms.
    So no lower level has a smaller sum, the search finds the only boundary, and a likelier token is
    never dropped before a less likely one. If a sum is within rounding of its goal (some 1e-6 of
    it), one token more or less may be kept. Counts are exact up to 2**24.

    Reference: https://github.com/google-research/t5x/blob/main/t5x/binary_search.py.
    """

    def next_bit(i: Array, number: Array) -> Array:
        ahead = number | (jnp.uint32(2**31) >> i.astype(jnp.uint32))
        is_above = logits >= _float_at(ahead)[:, None]
        reached = jnp.sum(jnp.where(is_above, weights, 0.0), axis=-1) >= goal
        return jnp.where(reached, ahead, number)

    def find() -> Array:
        number = jax.lax.fori_loop(0, 32, next_bit, jnp.zeros(logits.shape[0], jnp.uint32))
        return jnp.where(is_wanted, _float_at(number), -jnp.inf)

    def nothing() -> Array:
        return jnp.full(logits.shape[0], -jnp.inf)

    return jax.lax.cond(jnp.any(is_wanted), find, nothing)[:, None]


def _float_at(number: UInt32[Array, " rows"]) -> Float[Array, " rows"]:
    """The float32 with this number in ascending order; ±inf in place of the NaNs at both ends."""
    least, most, sign = (jnp.uint32(x) for x in (0x007FFFFF, 0xFF800000, 0x80000000))
    number = jnp.clip(number, least, most)
    bits = jnp.where(number >= sign, number ^ sign, ~number)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
