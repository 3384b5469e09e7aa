"""Queries, keys and values of new tokens, before and after norms and rotation."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pat_jax.models.layers import Rotation, rms_norm, rotate

# A GPU's product is split into the most parts, a power of two, for which tokens * outputs * parts
# are at most MOST_SUMS, and a part has at least LEAST_INPUTS: about as XLA does for an H100.
MOST_SUMS, LEAST_TOKENS, LEAST_INPUTS = 2**21, 64, 256


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("queries", "keys", "values", "rotation", "norms", "parts"),
    meta_fields=("eps",),
)
@dataclass(frozen=True)
class Projected:
    """What a layer's projections give for some tokens, and what finishes it."""

    queries: Float[Array, "rows length kv_heads queries_per_kv head_dim"]
    keys: Float[Array, "rows length kv_heads head_dim"]
    values: Float[Array, "rows length kv_heads head_dim"]
    rotation: Rotation
    norms: tuple[Array, Array] | None = None  # scales of query heads and of key heads
    eps: float = 0.0  # of the norms
    # The same as parts that a kernel adds, if it adds them: see `in_parts`. XLA computes either.
    parts: tuple[Float[Array, "parts rows length heads head_dim"], ...] = ()

    def by_token(self) -> "Projected":
        """Returns the tokens of one row, [1, tokens, …], as rows of one token, [tokens, 1, …]."""
        arrays = self.queries, self.keys, self.values, self.rotation
        queries, keys, values, rotation = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), arrays)
        parts = tuple(jnp.swapaxes(x, 1, 2) for x in self.parts)
        return replace(
            self, queries=queries, keys=keys, values=values, rotation=rotation, parts=parts
        )

    def finished(self) -> tuple[Array, Array, Array]:
        """Returns queries and keys with norms and rotation applied, and the values."""
        queries, keys = self.queries, self.keys
        if self.norms is not None:
            queries = rms_norm(queries, self.norms[0], self.eps)
            keys = rms_norm(keys, self.norms[1], self.eps)
        return rotate(queries, self.rotation), rotate(keys, self.rotation), self.values


def in_parts(
    x: Float[Array, "rows length in"], weights: Sequence[Float[Array, "*heads head_dim in"]]
) -> tuple[Float[Array, "parts rows length heads head_dim"], ...]:
    """Returns x · weightᵀ as float32 sums over parts of the inputs, for a kernel that adds them.

    XLA would split the product of few tokens too, and add the parts in a kernel of its own. One
    array has the heads of all weights. A single token has an array for each weight: for a product
    with a vector XLA reads concatenated weights two bytes at a time.
    """
    rows, length, size = x.shape
    dim = weights[0].shape[-2]
    flat = [jnp.reshape(w.astype(x.dtype), (-1, size)) for w in weights]
    outputs = sum(map(len, flat))
    most = min(MOST_SUMS // (max(rows * length, LEAST_TOKENS) * outputs), size // LEAST_INPUTS)
    parts = math.gcd(1 << max(most, 1).bit_length() - 1, size)
    if rows * length > 1:
        # Weights tied to x are concatenated as they are read; else once, before a loop over steps.
        x, flat = jax.lax.optimization_barrier((x, flat))
        flat = [jnp.concatenate(flat)]
    split = jnp.reshape(x, (rows, length, parts, -1))

    def product(weight: Array) -> Array:
        weight = jnp.reshape(weight, (len(weight), parts, -1))
        dims = ((3,), (2,)), ((2,), (1,))
        out = jax.lax.dot_general(split, weight, dims, preferred_element_type=jnp.float32)
        return jnp.reshape(out, (parts, rows, length, -1, dim))

    return tuple(map(product, flat))
