"""Checksums of policies: of the bits of each array and of their places, the same in every layout.

    Σ_arrays (2 · number + 1) · Σ_values mix(bits ^ SPREAD · place)   modulo 2^32, place counted in
    its array

As `mix` is one to one, a single value that differs always shows. Values that changed places, as the
shards of a wrong resharding, show except in one case of 2^32.

One program for each kind of array, which layers share: one program for all arrays of a model takes
as long to compile as a training step.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pat_jax.models.policy import Params, Policy
from pat_jax.programs.programs import Key, ProgramTable

SPREAD = 0x9E3779B9  # 2^32 over the golden ratio, odd: neighbouring places far from each other
WORD = 2**32


@dataclass(frozen=True)
class Counted:
    """Looks at the part of an array that counts, as if there were no more, rounded to bfloat16."""

    shape: tuple[int, ...]

    def __call__(self, x: Array) -> Array:
        return _array_sum(x.astype(jnp.bfloat16), self.shape)


class TreeChecksum:
    """The checksum of trees of arrays, by compiled programs."""

    def __init__(
        self,
        table: ProgramTable,
        key: Key,
        shapes: Any,
        sums: Sequence[Callable[[Array], Any]] | None = None,
    ):
        """Declares them.

        Args:
          key: of the programs; they differ by its `part`.
          shapes: of the trees, with shardings.
          sums: of each array the sum over its values, or those of the arrays that are made of it.
            Equal ones share a program.
        """
        self.table, self.keys = table, list[Key]()
        leaves, parts = jax.tree.leaves(shapes), dict[Any, int]()
        for like, of_array in zip(leaves, sums or [array_sums] * len(leaves), strict=True):
            kind = like.shape, like.dtype, like.sharding, of_array
            is_new = kind not in parts
            self.keys.append(key._replace(part=parts.setdefault(kind, len(parts))))
            if is_new:
                table.declare(self.keys[-1], partial(_called, of_array), like)

    def __call__(self, tree: Any) -> int:
        programs = {key: self.table[key] for key in dict.fromkeys(self.keys)}
        leaves = jax.tree.leaves(tree)
        return _total(programs[key](x) for key, x in zip(self.keys, leaves, strict=True))


def checksum(params: Any) -> int:
    """The checksum of a tree of arrays, without programs that were compiled before."""
    return _total(map(array_sums, jax.tree.leaves(params)))


def base_checksum(policy: Policy, params: Params) -> int:
    """The checksum of a frozen policy's values: the same in both dtypes, whatever the padding."""
    leaves = jax.tree.leaves(params)
    return _total(one(x) for one, x in zip(base_sums(policy), leaves, strict=True))


def base_sums(policy: Policy) -> list[Counted]:
    """What `base_checksum` counts of each array."""
    # Checkpoints hold sums with the vocabulary's usual padding. That of other numbers of devices is not
    # counted.
    multiple = math.gcd(policy.config.vocab_multiple, 128)
    config = replace(policy.config, vocab_multiple=multiple, query_multiple=1)
    counted = Policy.from_config(config).abstract_params
    return [Counted(x.shape) for x in jax.tree.leaves(counted)]


def array_sums(x: Any) -> Any:
    """The sum over the values of each array of a tree, modulo 2^32."""
    return jax.tree.map(lambda leaf: _array_sum(leaf, leaf.shape), x)


def _called(of_array: Callable[[Array], Any], x: Array) -> Any:
    return of_array(x)


def _total(sums: Iterable[Any]) -> int:
    # Each is waited for before the next program starts: on a CPU programs that wait for other devices
    # take the threads that those would run on.
    each = [int(one) for of_array in sums for one in jax.tree.leaves(of_array)]
    return sum((2 * i + 1) * one for i, one in enumerate(each)) % WORD


@partial(jax.jit, static_argnums=1)
def _array_sum(x: Array, counted: tuple[int, ...]) -> Array:
    spread, padding = jnp.zeros(x.shape, jnp.uint32), []
    for dim, size in enumerate(counted):
        stride = jnp.uint32(SPREAD * math.prod(counted[dim + 1 :]) % WORD)
        place = jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim)
        spread += stride * place
        if size < x.shape[dim]:
            padding.append(place >= size)
    mixed = _mix(_bits(x) ^ spread)
    for is_padding in padding:
        mixed = jnp.where(is_padding, 0, mixed)
    return jnp.sum(mixed, dtype=jnp.uint32)


def _bits(x: Array) -> Array:
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def _mix(x: Array) -> Array:
    """Spreads each bit over the word, one to one: the end of MurmurHash3
    (https://github.com/aappleby/smhasher, `fmix32`)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
