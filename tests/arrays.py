"""Compares trees of arrays to the last bit, and arrays on devices shard by shard."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np


def bits(x: jax.Array) -> bytes:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x).tobytes()


def assert_same_bits(got: Any, expected: Any) -> None:
    """Two trees of one structure, with the same bytes in leaves of the same shape and type: 0 is not -0."""
    chex.assert_trees_all_equal_shapes_and_dtypes(got, expected)
    chex.assert_trees_all_equal_comparator(
        lambda a, b: bits(a) == bits(b), lambda a, b: f"{a} is not {b}", got, expected
    )


def assert_same_shards(got: Any, expected: Any) -> None:
    """Two trees of one structure, with the same numbers in every shard, on the same devices."""

    def check(one: jax.Array, other: jax.Array) -> None:
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
        for a, b in zip(one.addressable_shards, other.addressable_shards, strict=True):
            assert a.device == b.device
            np.testing.assert_array_equal(a.data, b.data)

    chex.assert_trees_all_equal_structs(got, expected)
    jax.tree.map(check, got, expected)
