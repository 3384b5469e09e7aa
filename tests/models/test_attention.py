"""Attention without a cache: the same at every block and length, and memory that has no cliffs."""

import jax
import jax.numpy as jnp
import pytest
from chex import assert_trees_all_close

from pat_jax.models import layers


def loss(queries: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array):
    out = layers.attend(queries, keys, values, positions)
    return jnp.sum(jnp.sin(out)), out


@pytest.mark.parametrize("length", [24, 31, 33])
def test_in_query_blocks_equals_at_once(length: int, monkeypatch: pytest.MonkeyPatch):
    keys = jax.random.split(jax.random.key(0), 3)
    queries = jax.random.normal(keys[0], (2, length, 2, 2, 8))
    context = [jax.random.normal(key, (2, 2, length + 8, 8)) for key in keys[1:]]
    positions = jnp.stack([jnp.arange(length), jnp.arange(length) + 8])
    results = {}
    for block in (16, 512):
        monkeypatch.setattr(layers, "QUERY_BLOCK", block)
        run = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
        results[block] = jax.jit(run)(queries, *context, positions)
    assert_trees_all_close(*results.values(), rtol=1e-5, atol=2e-5)


def temporaries(length: int) -> int:
    """Bytes of a backward pass over one row, compiled and not run."""
    heads = 2, 2, 16
    queries = jax.ShapeDtypeStruct((1, length, *heads), jnp.float32)
    context = jax.ShapeDtypeStruct((1, heads[0], length, heads[2]), jnp.float32)
    positions = jax.ShapeDtypeStruct((1, length), jnp.int32)
    run = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
    compiled = jax.jit(run).lower(queries, context, context, positions).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize("length", [4095, 3585])
def test_no_length_is_a_cliff(length: int):
    """A sequence takes no more than a longer one that is divided evenly."""
    assert temporaries(length) < 1.05 * temporaries(4096)
