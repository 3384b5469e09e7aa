"""Log-probabilities of given tokens without the full logits, and the KL to a teacher.

The KL is over the teacher's k likeliest tokens, as in https://arxiv.org/abs/2608.14728, and one
*tail* of all others: one pass of the teacher gives them. For the reverse KL, TRL takes the policy's
k likeliest, which needs a pass of the policy first. With the tail, either is an exact KL of two
distributions over k + 1 outcomes. Without it, a policy could lower the loss by moving probability
to other tokens.

Knows hidden states and a function from these to logits. Does not know the model, nor how its arrays
are sharded.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pat_jax.rl.algorithm.kl import log_ratio
from pat_jax.rl.batches.train_batch import TopTokens

Logits = Callable[[Float[Array, "rows chunk embed"]], Float[Array, "rows chunk vocab"]]

# Its exp is exactly 0 in float32. Unlike -inf, it gives 0, not NaN, when multiplied by this 0.
_MASKED_LOGIT = -1e30
_BLOCKS = 128  # most blocks of the vocabulary; a power of 2, as the number of its shards mostly is
_LEAST = 1e-30  # lower bound of the tail's probability before its logarithm is taken


def token_logprobs(
    hidden: Float[Array, "rows length embed"],
    targets: Int[Array, "rows length"],
    logits_fn: Logits,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    chunk: int = 128,
    has_entropy_gradient: bool = False,
    teacher: TopTokens | None = None,
) -> tuple[Float[Array, "rows length"], ...]:
    """Returns log π(target) and the entropy of π at each position, in nats as float32. With a
    teacher, the third is `top_k_reverse_kl`. π is softmax(logits / temperature).

    Logits exist for `chunk` positions at a time, so memory is rows * chunk * vocab instead of
    rows * length * vocab. The backward pass recomputes them in the same chunks.

    Args:
      hidden: the last hidden states; position t predicts `targets[:, t]`.
      targets: token ids, each below `vocab_size`.
      logits_fn: the output head: a function from hidden states to logits of any float type.
      vocab_size: size of the vocabulary without padding; logits beyond it get probability 0.
      temperature: 0 (greedy sampling) is treated as 1, since it would give no gradient.
      chunk: largest number of positions in a chunk.
      has_entropy_gradient: whether the entropies have a gradient, which doubles the cost.
      teacher: a teacher's likeliest tokens, or None without a teacher.
    """

    @jax.checkpoint
    def one_chunk(given):
        hidden, targets, teacher = given
        shifted, log_total = _log_softmax(logits_fn(hidden), vocab_size, temperature or 1.0)
        logprobs, entropy = _of_targets(shifted, log_total, targets)
        if not has_entropy_gradient:
            entropy = jax.lax.stop_gradient(entropy)
        if teacher is None:
            return logprobs, entropy
        return logprobs, entropy, top_k_reverse_kl(shifted - log_total[..., None], teacher)

    return _in_chunks(one_chunk, chunk, (hidden, targets, teacher))


def top_token_logprobs(
    hidden: Float[Array, "rows length embed"],
    logits_fn: Logits,
    k: int,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    chunk: int = 128,
) -> TopTokens:
    """Returns the k likeliest tokens at each position, by the distribution of `token_logprobs`."""

    def one_chunk(hidden: Array) -> TopTokens:
        shifted, log_total = _log_softmax(logits_fn(hidden), vocab_size, temperature or 1.0)
        return top_tokens(shifted - log_total[..., None], k)

    return _in_chunks(one_chunk, chunk, hidden)


def _in_chunks(function: Callable, most: int, arrays: Any) -> Any:
    """Returns a function's results, a pytree of arrays [rows, length, …], for such a pytree. It is
    applied to equal chunks of up to `most` positions."""
    rows, length = jax.tree.leaves(arrays)[0].shape[:2]
    num_chunks = -(-length // most)
    chunk = -(-length // num_chunks)
    padding = num_chunks * chunk - length

    def split(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(rows, num_chunks, chunk, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(rows, num_chunks * chunk, *x.shape[3:])[:, :length]

    return jax.tree.map(join, jax.lax.map(function, jax.tree.map(split, arrays)))


def _log_softmax(
    logits: Float[Array, "rows chunk vocab"], vocab_size: int, temperature: float
) -> tuple[Float[Array, "rows chunk vocab"], Float[Array, "rows chunk"]]:
    """Returns logits / temperature minus their maximum, and log Σ exp of the difference."""
    logits = logits.astype(jnp.float32) / temperature
    if logits.shape[-1] > vocab_size:
        ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
        logits = jnp.where(ids < vocab_size, logits, _MASKED_LOGIT)
    shifted = logits - jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    return shifted, jnp.log(jnp.exp(shifted).sum(axis=-1))


def _of_targets(
    shifted: Float[Array, "rows chunk vocab"],
    log_total: Float[Array, "rows chunk"],
    targets: Int[Array, "rows chunk"],
) -> tuple[Float[Array, "rows chunk"], Float[Array, "rows chunk"]]:
    """Returns the targets' log-probabilities, and the entropies."""
    ids = jax.lax.broadcasted_iota(targets.dtype, shifted.shape, 2)
    # Compare-and-sum instead of a gather: if the vocabulary is sharded, each device sums its own
    # shard and one number per token is reduced, however the partitioner treats a gather along a
    # sharded axis. The transpose is a select, not a scatter.
    target = jnp.where(ids == targets[..., None], shifted, 0.0).sum(axis=-1)
    exponentials = jnp.exp(shifted)
    entropy = log_total - (exponentials * shifted).sum(axis=-1) / exponentials.sum(axis=-1)
    return target - log_total, entropy


def top_tokens(logprobs: Float[Array, "*position vocab"], k: int) -> TopTokens:
    """Returns the k likeliest tokens at each position; k is at most the vocabulary."""
    best, ids = _top_k(logprobs, k)
    is_top = jnp.isfinite(_spread(ids, best, logprobs.shape[-1]))
    # Summed: 1 - Σ of the k would have no digits left if the k tokens have nearly all probability.
    tail = jnp.where(is_top, 0.0, jnp.exp(logprobs)).sum(axis=-1)
    return TopTokens(ids, best, jnp.log(jnp.maximum(tail, _LEAST)))


def top_k_reverse_kl(
    logprobs: Float[Array, "*position vocab"], teacher: TopTokens
) -> Float[Array, "*position"]:
    """Returns KL(policy || teacher) in nats, with all tokens except the teacher's k as one outcome.

        Σ_i p_i log(p_i / q_i) + p_tail log(p_tail / q_tail)

    p are the policy's probabilities and q the teacher's; i are the teacher's k likeliest tokens.
    This is at most the KL over the whole vocabulary. It is equal if policy and teacher agree on the
    proportions of the other tokens, or if there are none. Log-ratios are clamped to ±20.

    Args:
      logprobs: the policy's log-probabilities over the whole vocabulary. They have the gradient.
      teacher: the teacher's tokens; ids beyond the policy's vocabulary have no probability there.

    Reference: Agarwal et al. 2023, https://arxiv.org/abs/2306.13649, section 2 (reverse KL);
    https://arxiv.org/abs/2608.14728 (the teacher's top k, with a tail).
    """
    # The teacher's numbers are spread over the vocabulary, not the policy's gathered: a sharded
    # vocabulary sums its own shards, and the gradient is a select, not a scatter.
    wanted = _spread(teacher.ids, teacher.logprobs, logprobs.shape[-1])
    is_top, policy = jnp.isfinite(wanted), jnp.exp(logprobs)
    apart = jnp.where(is_top, policy * log_ratio(logprobs, wanted), 0.0).sum(axis=-1)
    tail = jnp.where(is_top, 0.0, policy).sum(axis=-1)
    return apart + tail * log_ratio(jnp.log(jnp.maximum(tail, _LEAST)), teacher.tail)


def _top_k(
    x: Float[Array, "*position vocab"], k: int
) -> tuple[Float[Array, "*position k"], Int[Array, "*position k"]]:
    """Returns the result of `jax.lax.top_k`. The vocabulary is searched in blocks, so that only k
    candidates of each block are gathered, not the shards of the vocabulary."""
    *of_position, vocab = x.shape
    blocks = math.gcd(vocab, _BLOCKS)
    while vocab // blocks < k:
        blocks //= 2
    best, ids = jax.lax.top_k(x.reshape(*of_position, blocks, vocab // blocks), k)
    ids += jax.lax.broadcasted_iota(ids.dtype, ids.shape, ids.ndim - 2) * (vocab // blocks)
    best, places = jax.lax.top_k(best.reshape(*of_position, blocks * k), k)
    return best, jnp.take_along_axis(ids.reshape(*of_position, blocks * k), places, axis=-1)


def _spread(
    ids: Int[Array, "*position k"], values: Float[Array, "*position k"], size: int
) -> Float[Array, "*position size"]:
    """Returns each value at its id, and -inf at all others."""
    every = jax.lax.broadcasted_iota(ids.dtype, (*ids.shape, size), ids.ndim)
    return jnp.where(every == ids[..., None], values[..., None], -jnp.inf).max(axis=-2)
