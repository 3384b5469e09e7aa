"""On-policy distillation over the teacher's k likeliest tokens and one *tail* of all others.

Knows log-probabilities over a vocabulary, of policy and teacher. Does not know the models, nor how
their arrays are sharded.

The k tokens are the teacher's likeliest, as in https://arxiv.org/abs/2608.14728: one pass of the
teacher gives them. For the reverse KL, TRL takes the policy's k likeliest, which needs a pass of
the policy first. With the tail, either is an exact KL of two distributions over k + 1 outcomes.
Without it, a policy could lower the loss by moving probability to other tokens.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pat_jax.rl.algorithm.kl import log_ratio
from pat_jax.rl.batches.train_batch import TopTokens

_BLOCKS = 128  # most blocks of the vocabulary; a power of 2, as the number of its shards mostly is
_LEAST = 1e-30  # lower bound of the tail's probability before its logarithm is taken


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
