"""Log-probabilities of given tokens without the full logits.

Knows hidden states and a function from these to logits. Does not know the model, nor how its arrays
are sharded.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Logits = Callable[[Float[Array, "rows chunk embed"]], Float[Array, "rows chunk vocab"]]

# Its exp is exactly 0 in float32. Unlike -inf, it gives 0 and not NaN when multiplied by that 0.
_MASKED_LOGIT = -1e30


def next_tokens(tokens: Int[Array, "rows length"]) -> Int[Array, "rows length"]:
    """Returns what each position predicts: the tokens moved left by one, 0 in the last column."""
    return jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))


def token_logprobs(
    hidden: Float[Array, "rows length embed"],
    targets: Int[Array, "rows length"],
    logits_fn: Logits,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    chunk: int = 128,
    has_entropy_gradient: bool = False,
) -> tuple[Float[Array, "rows length"], Float[Array, "rows length"]]:
    """Returns log π(target) and the entropy of π at each position.

    π is softmax(logits / temperature).

    Logits exist for `chunk` positions at a time, so memory is rows * chunk * vocab instead of
    rows * length * vocab. The backward pass recomputes them in the same chunks.

    Args:
      hidden: the last hidden states; position t predicts `targets[:, t]`.
      targets: token ids, each below `vocab_size`.
      logits_fn: the head, applied to a chunk of positions; any float type.
      vocab_size: the real vocabulary; logits beyond it are padding and get probability 0.
      temperature: 0 (greedy sampling) is treated as 1, there being no gradient otherwise.
      chunk: most positions in one chunk.
      has_entropy_gradient: whether the entropies have a gradient, which costs as much again.

    Returns:
      Log-probabilities and entropies in nats, both float32.
    """

    @jax.checkpoint
    def one_chunk(hidden_and_targets):
        hidden, targets = hidden_and_targets
        logits, divisor = logits_fn(hidden), temperature or 1.0
        logprobs, entropy = _chunk_logprobs(logits, targets, vocab_size, divisor)
        return logprobs, entropy if has_entropy_gradient else jax.lax.stop_gradient(entropy)

    logprobs, entropy = _in_chunks(one_chunk, chunk, hidden, targets)
    return logprobs, entropy


def _in_chunks(function: Callable, most: int, *arrays: Array) -> tuple[Array, ...]:
    """Applies a function to arrays[rows, length, …] in equal chunks of up to `most` positions."""
    rows, length = arrays[0].shape[:2]
    num_chunks = -(-length // most)
    chunk = -(-length // num_chunks)
    padding = num_chunks * chunk - length

    def split(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(rows, num_chunks, chunk, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(rows, num_chunks * chunk)[:, :length]

    return tuple(map(join, jax.lax.map(function, tuple(map(split, arrays)))))


def _chunk_logprobs(
    logits: Float[Array, "rows chunk vocab"],
    targets: Int[Array, "rows chunk"],
    vocab_size: int,
    temperature: float,
) -> tuple[Float[Array, "rows chunk"], Float[Array, "rows chunk"]]:
    logits = logits.astype(jnp.float32) / temperature
    ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2)
    if logits.shape[-1] > vocab_size:
        logits = jnp.where(ids < vocab_size, logits, _MASKED_LOGIT)
    shifted = logits - jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    exponentials = jnp.exp(shifted)
    total = exponentials.sum(axis=-1)
    # Compare-and-sum instead of a gather: if the vocabulary is sharded, each device sums its own
    # shard and one number per token is reduced, however the partitioner treats a gather along a
    # sharded axis. The transpose is a select, not a scatter.
    target = jnp.where(ids == targets[..., None], shifted, 0.0).sum(axis=-1)
    log_total = jnp.log(total)
    entropy = log_total - (exponentials * shifted).sum(axis=-1) / total
    return target - log_total, entropy
