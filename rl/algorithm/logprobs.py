"""Log-probabilities of given tokens without the full logits, and the KL to a teacher.

The KL is over the teacher's k likeliest tokens, as in https://arxiv.org/abs/2608.14728, and one
*tail* of all others: one pass of the teacher gives them. For the reverse KL, TRL takes the policy's
k likeliest, which needs a pass of the policy first. With the tail, either is an exact KL of two
distributions over k + 1 outcomes. Without it, a policy could lower the loss by moving probability
to other tokens.

Knows hidden states and the weights of the output head. Does not know the model, nor how its arrays
are sharded.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pat_jax.rl.algorithm.kl import log_ratio
from pat_jax.rl.batches.train_batch import TopTokens

# Its exp is exactly 0 in float32. Unlike -inf, it gives 0, not NaN, when multiplied by this 0.
_MASKED_LOGIT = -1e30
_BLOCKS = 128  # most blocks of the vocabulary; a power of 2, as the number of its shards mostly is
_LEAST = 1e-30  # lower bound of the tail's probability before its logarithm is taken


def token_logprobs(
    hidden: Float[Array, "rows length embed"],
    targets: Int[Array, "rows length"],
    head: Float[Array, "vocab embed"],
    *,
    vocab_size: int,
    temperature: float = 1.0,
    chunk: int = 128,
    has_entropy_gradient: bool = False,
    teacher: TopTokens | None = None,
) -> tuple[Float[Array, "rows length"], ...]:
    """Returns log π(target) and the entropy of π at each position, in nats as float32. With a
    teacher, the third is `top_k_reverse_kl`. π is softmax(hidden · headᵀ / temperature).

    Logits exist for `chunk` positions at a time, so memory is rows * chunk * vocab instead of
    rows * length * vocab. The backward pass recomputes them in the same chunks. If g and h are the
    gradients of log π(target) and of the entropy H, those of the logits are

        (g · ([i = target] - π_i) - h · π_i · (log π_i + H)) / temperature

    The head is rounded to the dtype of `hidden`. Products are summed in float32, and so is the
    head's gradient over all chunks.

    Args:
      hidden: the last hidden states; position t predicts `targets[:, t]`.
      targets: token ids, each below `vocab_size`.
      head: the weights of the output head, with padding beyond `vocab_size`.
      vocab_size: size of the vocabulary without padding; logits beyond it get probability 0.
      temperature: 0 (greedy sampling) is treated as 1, since it would give no gradient.
      chunk: largest number of positions in a chunk.
      has_entropy_gradient: whether the entropies have a gradient.
      teacher: a teacher's likeliest tokens, or None without a teacher.
    """
    softmax = _Softmax(vocab_size, temperature or 1.0, chunk, has_entropy_gradient)
    return _of_targets(softmax, hidden, head.astype(jnp.float32), targets, teacher)


def top_token_logprobs(
    hidden: Float[Array, "rows length embed"],
    head: Float[Array, "vocab embed"],
    k: int,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    chunk: int = 128,
) -> TopTokens:
    """Returns the k likeliest tokens at each position, by the distribution of `token_logprobs`."""
    softmax = _Softmax(vocab_size, temperature or 1.0, chunk)
    head = head.astype(hidden.dtype)

    def one_chunk(_: None, hidden: Array) -> tuple[None, TopTokens]:
        logits = softmax.logits(hidden, head)
        return None, top_tokens(jax.nn.log_softmax(logits), k)

    return _in_chunks(one_chunk, None, hidden, chunk)[1]


class _Softmax(NamedTuple):
    """The options of `token_logprobs`."""

    vocab_size: int
    temperature: float
    chunk: int
    has_entropy_gradient: bool = False

    def logits(
        self, hidden: Float[Array, "rows chunk embed"], head: Float[Array, "vocab embed"]
    ) -> Float[Array, "rows chunk vocab"]:
        """Returns float32 logits / temperature, masked beyond the vocabulary."""
        with jax.named_scope("lm_head"):
            logits = _dot(hidden, head, ((2,), (1,)))
        if self.temperature != 1:
            logits = logits / self.temperature
        if head.shape[0] > self.vocab_size:
            logits = jnp.where(_ids(head) < self.vocab_size, logits, _MASKED_LOGIT)
        return logits


def _ids(head: Float[Array, "vocab embed"]) -> Int[Array, "1 1 vocab"]:
    return jnp.arange(head.shape[0], dtype=jnp.int32)[None, None]


def _dot(x: Array, y: Array, contracted: tuple[tuple[int, ...], tuple[int, ...]]) -> Array:
    return jax.lax.dot_general(x, y, (contracted, ((), ())), preferred_element_type=jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _of_targets(
    softmax: _Softmax, hidden: Array, head: Array, targets: Array, teacher: TopTokens | None
) -> tuple[Float[Array, "rows length"], ...]:
    return _forward(softmax, hidden, head, targets, teacher)[0]


def _forward(
    softmax: _Softmax, hidden: Array, head: Array, targets: Array, teacher: TopTokens | None
) -> tuple[tuple[Array, ...], Any]:
    head = head.astype(hidden.dtype)  # once, not in each chunk

    def one_chunk(_: None, given: Any) -> tuple[None, Any]:
        hidden, targets, teacher = given
        logits = softmax.logits(hidden, head)
        largest = logits.max(axis=-1, keepdims=True)
        shifted = logits - largest
        exponentials = jnp.exp(shifted)
        total = exponentials.sum(axis=-1, keepdims=True)
        log_total = jnp.log(total)
        entropy = log_total - (exponentials * shifted).sum(axis=-1, keepdims=True) / total
        target = jnp.take_along_axis(logits, targets[..., None], axis=-1)
        found = (target - largest - log_total)[..., 0], entropy[..., 0]
        if teacher is not None:
            found += (top_k_reverse_kl(shifted - log_total, teacher),)
        return None, (found, (largest, log_total, entropy))

    given = hidden, targets, teacher
    _, (found, sums) = _in_chunks(one_chunk, None, given, softmax.chunk)
    return found, (head, given, sums)


def _backward(
    softmax: _Softmax, saved: Any, gradients: tuple[Array, ...]
) -> tuple[Array, Array, None, None]:
    head, given, sums = saved
    gradients = jax.tree.map(lambda x: x / softmax.temperature, gradients)

    def one_chunk(of_head: Array, given: Any) -> tuple[Array, Array]:
        (hidden, targets, teacher), (largest, log_total, entropy), gradients = given
        of_target, of_entropy, *of_kl = gradients
        logits = softmax.logits(hidden, head)
        logprobs = logits - largest - log_total
        probs = jnp.exp(logprobs)
        is_target = _ids(head) == targets[..., None]
        of_logits = jnp.where(is_target, 1 - probs, -probs) * of_target[..., None]
        if softmax.has_entropy_gradient:
            of_logits -= probs * (logprobs + entropy) * of_entropy[..., None]
        if teacher is not None:
            _, pull = jax.vjp(lambda x: top_k_reverse_kl(x, teacher), logprobs)
            (of_logprobs,) = pull(*of_kl)
            of_logits += of_logprobs - probs * of_logprobs.sum(axis=-1, keepdims=True)
        of_logits = of_logits.astype(head.dtype)
        of_hidden = _dot(of_logits, head, ((2,), (0,))).astype(head.dtype)
        return of_head + _dot(of_logits, hidden, ((0, 1), (0, 1))), of_hidden

    none = jnp.zeros_like(head, jnp.float32)
    of_head, of_hidden = _in_chunks(one_chunk, none, (given, sums, gradients), softmax.chunk)
    return of_hidden, of_head, None, None


_of_targets.defvjp(_forward, _backward)


def _in_chunks(
    function: Callable[[Any, Any], tuple[Any, Any]], carried: Any, arrays: Any, most: int
) -> tuple[Any, Any]:
    """Applies a function to equal chunks of up to `most` positions, as `jax.lax.scan`. The arrays
    and the function's results are pytrees of arrays [rows, length, …]."""
    rows, length = jax.tree.leaves(arrays)[0].shape[:2]
    num_chunks = -(-length // most)
    chunk = -(-length // num_chunks)
    padding = num_chunks * chunk - length

    def split(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(rows, num_chunks, chunk, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(rows, num_chunks * chunk, *x.shape[3:])[:, :length]

    carried, found = jax.lax.scan(function, carried, jax.tree.map(split, arrays))
    return carried, jax.tree.map(join, found)


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
