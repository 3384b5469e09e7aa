"""Log-probabilities of given tokens without the full logits.

Knows hidden states and a function from these to logits. Does not know the model, nor how its arrays
are sharded.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pat_jax.rl.algorithm.top_k_distillation import top_k_reverse_kl, top_tokens
from pat_jax.rl.batches.train_batch import TopTokens

Logits = Callable[[Float[Array, "rows chunk embed"]], Float[Array, "rows chunk vocab"]]

# Its exp is exactly 0 in float32. Unlike -inf, it gives 0, not NaN, when multiplied by this 0.
_MASKED_LOGIT = -1e30


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
