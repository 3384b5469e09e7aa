"""Attention within rows of several sequences: against float64, with gradients, on both paths."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_jax.models import row_attention
from pat_jax.models.policy import Params, Policy
from pat_jax.models.presets import preset
from pat_jax.models.row_attention import BLOCK, attend_rows

ROWS, KV, GROUP, DIM = 2, 2, 2, 8


def positions_of(sequences: list[list[int]], length: int) -> np.ndarray:
    """Of rows of sequences with these lengths; what is filled up is at 0."""
    positions = np.zeros((len(sequences), length), np.int32)
    for row, lengths in zip(positions, sequences, strict=True):
        counted = np.concatenate([np.arange(n) for n in lengths])
        row[: len(counted)] = counted
    return positions


def draw(rng: np.random.Generator, length: int) -> list[np.ndarray]:
    context = (ROWS, KV, length, DIM)
    shapes = (ROWS, length, KV, GROUP, DIM), context, context, (ROWS, length, KV, GROUP, DIM)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def by_sequence(queries, keys, values, grads, positions):
    """Attention in float64 and the gradients of Σ grads * attention, one query at a time."""
    queries, keys, values, grads = (x.astype(np.float64) for x in (queries, keys, values, grads))
    out, *to = (np.zeros_like(x) for x in (queries, queries, keys, values))
    for row, t, head, one in np.ndindex(queries.shape[:-1]):
        seen = slice(t - positions[row, t], t + 1)
        key, value = keys[row, head, seen], values[row, head, seen]
        query, grad = queries[row, t, head, one], grads[row, t, head, one]
        weights = np.exp(key @ query / np.sqrt(DIM))
        weights /= weights.sum()
        out[row, t, head, one] = weights @ value
        along = value @ grad
        to_scores = weights * (along - weights @ along) / np.sqrt(DIM)
        to[0][row, t, head, one] = to_scores @ key
        to[1][row, head, seen] += np.outer(to_scores, query)
        to[2][row, head, seen] += np.outer(weights, grad)
    return out, to


PATHS = {"blocks": attend_rows, "all keys": row_attention._all_keys}
WHOLE = [[BLOCK * 3], [BLOCK * 3]]
MANY = [[1, 40, BLOCK - 5, 30, 2, 50], [BLOCK + 20, 1, BLOCK]]  # the second ends in padding
SHORT = [[5, 9], [20]]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("sequences", [WHOLE, MANY, SHORT])
def test_attention_and_its_gradients_are_those_of_each_sequence(path: str, sequences):
    length = max(map(sum, sequences))
    positions = positions_of(sequences, length)
    queries, keys, values, grads = draw(np.random.default_rng(0), length)

    def run(*arrays):
        out, pull_back = jax.vjp(lambda *x: PATHS[path](*x, jnp.asarray(positions)), *arrays)
        return out, list(pull_back(jnp.asarray(grads)))

    wanted = by_sequence(queries, keys, values, grads, positions)
    assert_trees_all_close(jax.jit(run)(queries, keys, values), wanted, rtol=1e-4, atol=2e-5)


def test_blocks_that_no_query_sees_are_not_computed():
    """NaN in keys and values is seen by their own sequence alone, and by no block of others."""
    length = 4 * BLOCK
    positions = jnp.asarray(positions_of([[2 * BLOCK, 2 * BLOCK]] * ROWS, length))
    queries, keys, values, _ = draw(np.random.default_rng(1), length)
    values[:, :, : 2 * BLOCK] = np.nan
    out = np.asarray(jax.jit(attend_rows)(queries, keys, values, positions))
    assert np.isnan(out[:, : 2 * BLOCK]).all() and np.isfinite(out[:, 2 * BLOCK :]).all()


def test_half_precision_stays_near():
    positions = jnp.asarray(positions_of(MANY, 200))
    queries, keys, values = (
        jnp.asarray(x, jnp.bfloat16) for x in draw(np.random.default_rng(2), 200)[:3]
    )
    got = jax.jit(attend_rows)(queries, keys, values, positions)
    assert got.dtype == jnp.bfloat16
    queries, keys, values = (x.astype(jnp.float32) for x in (queries, keys, values))
    wanted = attend_rows(queries, keys, values, positions)
    assert_trees_all_close(got.astype(jnp.float32), wanted, atol=0.03)


POLICY = Policy.from_config(preset("tiny", vocab_size=61))
LENGTH = 96


@cache
def params() -> Params:
    return POLICY.init(0)


@jax.jit
def logits(params: Params, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    model = POLICY.bind(params)
    return model.logits(model(tokens, positions)[0])


@settings(max_examples=15)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 1000), st.data())
def test_the_logits_of_a_sequence_do_not_depend_on_its_neighbours(lengths, seed, data):
    while sum(lengths) > LENGTH:
        lengths.pop()
    chosen = data.draw(st.integers(0, len(lengths) - 1))
    start = sum(lengths[:chosen])
    own = slice(start, start + lengths[chosen])
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 61, (1, LENGTH), np.int32)
    alone = np.zeros_like(packed)
    alone[:, : lengths[chosen]] = packed[:, own]
    in_row = logits(params(), packed, positions_of([lengths], LENGTH))[:, own]
    by_itself = logits(params(), alone, positions_of([[lengths[chosen]]], LENGTH))[
        :, : lengths[chosen]
    ]
    np.testing.assert_allclose(in_row, by_itself, rtol=1e-4, atol=2e-5)
