"""Checksums of a policy's parameters, over the bits and places of all values.

    Σ_arrays (2 · number + 1) · Σ_values mix(bits ^ SPREAD · place)   modulo 2^32, place in array

`number` is an array's index, and `place` a value's index in its array. So a checksum is the same in
every layout. `mix` is one to one, so a single different value always shows. Values in wrong places,
such as those of swapped shards, show except with a chance of 1 in 2^32.

One program is compiled for each kind of array, which layers share: one program for all arrays of a
model takes as long to compile as a training step.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pat_jax.common.owners import is_absent, known_to_all
from pat_jax.models.policy import Params, Policy
from pat_jax.programs.programs import Key, ProgramTable

SPREAD = 0x9E3779B9  # 2^32 / golden ratio, odd: puts neighbouring places far from each other
WORD = 2**32


@dataclass(frozen=True)
class Counted:
    """A function that returns the checksum of an array rounded to bfloat16, without its padding."""

    shape: tuple[int, ...]  # shape of the array without padding

    def __call__(self, x: Array) -> Array:
        return _array_sum(x.astype(jnp.bfloat16), self.shape)


class TreeChecksum:
    """Computes the checksum of trees of arrays by compiled programs."""

    def __init__(
        self,
        table: ProgramTable,
        key: Key,
        shapes: Any,
        sums: Sequence[Callable[[Array], Any]] | None = None,
    ):
        """Declares the programs.

        Args:
          key: key of the programs in `table`; they differ only in the key's `part`.
          shapes: shapes with shardings of the trees' arrays.
          sums: for each array, a function that returns its sum, or the sums of arrays made from it.
            Equal functions share a program. None stands for `array_sums` of every array.
        """
        self.table = table
        self.keys = list[Key]()
        leaves = jax.tree.leaves(shapes)
        parts = dict[Any, int]()
        self._devices = leaves[0].sharding.device_set
        for like, of_array in zip(leaves, sums or [array_sums] * len(leaves), strict=True):
            kind = like.shape, like.dtype, like.sharding, of_array
            is_new = kind not in parts
            self.keys.append(key._replace(part=parts.setdefault(kind, len(parts))))
            if is_new:
                table.declare(self.keys[-1], partial(_called, of_array), like)

    def __call__(self, tree: Any) -> int:
        if is_absent(self._devices):
            return known_to_all("checksum", self._devices, 0)
        programs = {key: self.table[key] for key in dict.fromkeys(self.keys)}
        leaves = jax.tree.leaves(tree)
        found = _total(programs[key](x) for key, x in zip(self.keys, leaves, strict=True))
        return known_to_all("checksum", self._devices, found)


def checksum(params: Any) -> int:
    """Returns the checksum of a tree of arrays, without precompiled programs."""
    return _total(map(array_sums, jax.tree.leaves(params)))


def base_checksum(policy: Policy, params: Params) -> int:
    """Returns the checksum of a frozen policy's values. It does not depend on padding, and is the
    same in float32 and bfloat16."""
    leaves = jax.tree.leaves(params)
    return _total(one(x) for one, x in zip(base_sums(policy), leaves, strict=True))


def base_sums(policy: Policy) -> list[Counted]:
    """Returns for each array the function whose sum `base_checksum` adds up."""
    # Checkpoints hold sums that include the vocabulary's usual padding, but not that of other
    # numbers of devices.
    multiple = math.gcd(policy.config.vocab_multiple, 128)
    config = replace(policy.config, vocab_multiple=multiple, query_multiple=1)
    counted = Policy.from_config(config).abstract_params
    return [Counted(x.shape) for x in jax.tree.leaves(counted)]


def array_sums(x: Any) -> Any:
    """Returns the sum over the values of each array of a tree, modulo 2^32."""
    return jax.tree.map(lambda leaf: _array_sum(leaf, leaf.shape), x)


def _called(of_array: Callable[[Array], Any], x: Array) -> Any:
    return of_array(x)


def _total(sums: Iterable[Any]) -> int:
    # Wait for each sum before the next program starts: on a CPU, programs that wait for other
    # devices take the threads that those would run on.
    each = [int(one) for of_array in sums for one in jax.tree.leaves(of_array)]
    return sum((2 * i + 1) * one for i, one in enumerate(each)) % WORD


@partial(jax.jit, static_argnums=1)
def _array_sum(x: Array, counted: tuple[int, ...]) -> Array:
    spread = jnp.zeros(x.shape, jnp.uint32)
    padding = []
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
    """Returns uint32 words in which each bit depends on all bits of the input, one to one: the last
    step of MurmurHash3 (https://github.com/aappleby/smhasher, `fmix32`)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
