"""Compares arrays on devices, shard by shard."""

import jax
import numpy as np


def assert_same_shards(one: jax.Array, other: jax.Array) -> None:
    assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
    for a, b in zip(one.addressable_shards, other.addressable_shards, strict=True):
        assert a.device == b.device
        np.testing.assert_array_equal(a.data, b.data)
