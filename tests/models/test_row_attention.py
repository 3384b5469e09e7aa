"""Attention within rows of several sequences: against float64, with gradients, by each kernel."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_jax.layout.chain import layout_chain
from pat_jax.layout.mesh import factored_mesh
from pat_jax.layout.partitions import AutoPartition
from pat_jax.models.attention import CONTEXT, QUERIES
from pat_jax.models.kernels import row_attention_tpu
from pat_jax.models.kernels.row_attention import attend_rows
from pat_jax.models.kernels.row_attention_cpu import BLOCK
from pat_jax.models.kernels.row_attention_gpu import attend_on_gpu
from pat_jax.models.kernels.row_attention_tpu import attend_on_tpu
from pat_jax.models.kernels.row_bounds import Seen, end_blocks, is_seen, key_blocks, seen_keys
from pat_jax.models.presets import preset
from pat_jax.planning.types import Split

ROWS, KV, GROUP, DIM = 2, 2, 2, 8


Sequence_ = int | tuple[int, ...]  # its tokens; or those of its beginning, and of each branch


def positions_of(sequences: Sequence[Sequence[Sequence_]], length: int) -> np.ndarray:
    """Of rows of sequences with these lengths; what is filled up is at 0."""
    positions = np.zeros((len(sequences), length), np.int32)
    for row, lengths in zip(positions, sequences, strict=True):
        counted = [t for each in lengths for t in counts_of(each)]
        row[: len(counted)] = counted
    return positions


def counts_of(sequence: Sequence_) -> list[int]:
    shared, *branches = (sequence,) if isinstance(sequence, int) else sequence
    return [*range(shared), *(shared + t for n in branches for t in range(n))]


def seen_by(sequences: Sequence[Sequence[Sequence_]], length: int) -> np.ndarray:
    """Which keys each query of each row sees, one sequence and branch after the other."""
    seen = np.zeros((len(sequences), length, length), bool)
    for row, lengths in zip(seen, sequences, strict=True):
        start = 0
        for each in lengths:
            shared, *branches = (each,) if isinstance(each, int) else each
            beginning = slice(start, start + shared)
            row[beginning, beginning] = np.tri(shared)
            start += shared
            for n in branches:
                own = slice(start, start + n)
                row[own, beginning] = True
                row[own, own] = np.tri(n)
                start += n
        filled = np.arange(start, length)
        row[filled, filled] = True
    return seen


def draw(rng: np.random.Generator, length: int) -> list[np.ndarray]:
    context = (ROWS, KV, length, DIM)
    shapes = (ROWS, length, KV, GROUP, DIM), context, context, (ROWS, length, KV, GROUP, DIM)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def by_query(queries, keys, values, grads, seen_keys):
    """Attention in float64 and the gradients of Σ grads * attention, one query at a time."""
    queries, keys, values, grads = (x.astype(np.float64) for x in (queries, keys, values, grads))
    out, *to = (np.zeros_like(x) for x in (queries, queries, keys, values))
    for row, t, head, one in np.ndindex(queries.shape[:-1]):
        (seen,) = np.nonzero(seen_keys[row, t])
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


PATHS = {
    "blocks": attend_rows,
    "gpu": partial(attend_on_gpu, interpret=True),
    "tpu": partial(attend_on_tpu, interpret=True),
}
WHOLE = [[BLOCK * 3], [BLOCK * 3]]
MANY = [[1, 40, BLOCK - 5, 30, 2, 50], [BLOCK + 20, 1, BLOCK]]  # the second ends in padding
SHORT = [[5, 9], [20]]
BRANCHES = [
    # Within a block, over several, and with a block between what is shared and what is seen again.
    [(40, 30, 1, 70, 20), 9],
    [3, (1, 2, 3), (BLOCK, BLOCK, BLOCK), (20, 5, 5, 5, 5)],  # ends in padding
]


BRANCHING = [path for path in PATHS if path != "tpu"]
SEQUENCES = st.lists(
    st.integers(1, 30) | st.lists(st.integers(1, 20), min_size=2, max_size=6).map(tuple),
    min_size=1,
    max_size=6,
)


def total(sequence: Sequence_) -> int:
    return sequence if isinstance(sequence, int) else sum(sequence)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a TPU too several to a row."""
    monkeypatch.setattr(row_attention_tpu, "BLOCK", row_attention_tpu.LANES)


def with_gradients(path: str, positions: np.ndarray, arrays: Sequence[np.ndarray]):
    """Attention by a path and the gradients of Σ grads * attention."""
    return compiled(path, row_attention_tpu.BLOCK)(positions, *arrays)


@cache
def compiled(path: str, block: int):
    del block  # another one compiles anew

    def run(positions, *arrays):
        *inputs, grads = arrays
        out, pull_back = jax.vjp(lambda *x: PATHS[path](*x, positions), *inputs)
        return out, list(pull_back(grads))

    return jax.jit(run)


@pytest.mark.parametrize(
    ("sequences", "path"),
    [
        pytest.param(each, path, marks=[pytest.mark.slow] * (path != "blocks" and each != MANY))
        for each in (WHOLE, MANY, SHORT)
        for path in PATHS
    ],
)
def test_attention_and_its_gradients_are_those_of_each_sequence(sequences, path: str):
    check_against_float64(path, sequences, max(map(sum, sequences)))


@pytest.mark.parametrize("path", BRANCHING)
def test_a_branch_sees_the_beginning_of_its_sequence_and_itself(path: str):
    check_against_float64(path, BRANCHES, 170)


@pytest.mark.parametrize("path", BRANCHING)
@settings(max_examples=8)
@given(st.lists(SEQUENCES, min_size=ROWS, max_size=ROWS), st.integers(0, 1000))
def test_any_branches(path: str, sequences, seed: int):
    while max(sizes := [sum(map(total, row)) for row in sequences]) > 2 * BLOCK:
        sequences[int(np.argmax(sizes))].pop()
    check_against_float64(path, sequences, 2 * BLOCK, seed)


def check_against_float64(path: str, sequences, length: int, seed: int = 0) -> None:
    positions = positions_of(sequences, length)
    arrays = draw(np.random.default_rng(seed), length)
    got = with_gradients(path, positions, arrays)
    wanted = by_query(*arrays, seen_keys=seen_by(sequences, length))
    assert_trees_all_close(got, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("broken", [0, 1])
def test_blocks_that_no_query_sees_are_not_computed(path: str, broken: int):
    """NaN in one sequence is seen by itself alone, and by no block of the other, in either pass."""
    half = row_attention_tpu.LANES
    positions = positions_of([[half, half]] * ROWS, 2 * half)
    queries, keys, values, grads = draw(np.random.default_rng(1), 2 * half)
    own = slice(broken * half, (broken + 1) * half)
    for x in (queries, grads):
        x[:, own] = np.nan
    for x in (keys, values):
        x[:, :, own] = np.nan
    out, (to_queries, *to_context) = with_gradients(path, positions, (queries, keys, values, grads))
    for x in (out, to_queries, *(jnp.swapaxes(x, 1, 2) for x in to_context)):
        is_nan = np.isnan(np.reshape(x, (ROWS, 2, -1)))
        assert is_nan[:, broken].all() and not is_nan[:, 1 - broken].any()


@pytest.mark.parametrize(
    "path", [pytest.param(x, marks=[pytest.mark.slow] * (x != "blocks")) for x in PATHS]
)
def test_each_device_attends_to_its_rows_and_heads(path: str):
    """Two KV heads in four ways: two devices read one of them, and its gradient is their sum."""
    config = replace(preset("tiny"), num_heads=8, num_kv_heads=2)
    layouts, _ = layout_chain(factored_mesh(jax.devices()), config)
    partition = AutoPartition(layouts[Split(2, 4)])
    positions = jnp.asarray(positions_of([[30, 10], [3, 37]], 40))
    shapes = (ROWS, 40, 2, 4, DIM), (ROWS, 2, 40, DIM), (ROWS, 2, 40, DIM), (ROWS, 40, 2, 4, DIM)
    rng = np.random.default_rng(4)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]

    def run(attend: Callable[..., jax.Array], *arrays: jax.Array):
        *inputs, grads = arrays
        out, pull_back = jax.vjp(lambda *x: attend(*x, positions), *inputs)
        return out, list(pull_back(grads))

    def on_shards(*x: jax.Array) -> jax.Array:
        names = QUERIES, CONTEXT, CONTEXT, ("batch", None)
        return partition.on_shards(PATHS[path], list(zip(x, names, strict=True)), QUERIES)

    got = jax.jit(partial(run, on_shards))(*arrays)
    wanted = jax.jit(partial(run, attend_rows))(*arrays)
    assert_trees_all_close(got, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("path", PATHS)
def test_half_precision_stays_near(path: str):
    positions = jnp.asarray(positions_of(MANY, 200))
    queries, keys, values = (
        jnp.asarray(x, jnp.bfloat16) for x in draw(np.random.default_rng(2), 200)[:3]
    )
    got = jax.jit(PATHS[path])(queries, keys, values, positions)
    assert got.dtype == jnp.bfloat16
    queries, keys, values = (x.astype(jnp.float32) for x in (queries, keys, values))
    wanted = jax.jit(attend_rows)(queries, keys, values, positions)
    assert_trees_all_close(got.astype(jnp.float32), wanted, atol=0.03)


@given(SEQUENCES, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 8]))
def test_bounds_of_blocks_are_those_of_what_their_tokens_see(sequences, queries, keys):
    length = 128
    while sum(map(total, sequences)) > length:
        sequences.pop()
    seen = seen_keys(jnp.asarray(positions_of([sequences], length)))
    sees = seen_by([sequences], length)[0]
    at = jnp.arange(length)
    by_query = Seen(*(x[0, :, None] for x in seen))
    np.testing.assert_array_equal(is_seen(by_query, at[:, None], at[None]), sees)
    shape = length // queries, queries, length // keys, keys
    blocks = np.asarray(np.reshape(sees, shape).any((1, 3)))
    own, first, shared = (x[0, :, None] for x in key_blocks(seen, queries=queries, keys=keys))
    key, last = (
        np.arange(length // keys)[None],
        (np.arange(length // queries)[:, None] + 1) * queries,
    )
    is_own, is_shared = (own <= key) & (key * keys < last), (first <= key) & (key < shared)
    np.testing.assert_array_equal(is_own | is_shared, blocks)
    assert not (is_own & is_shared).any()
    ends = end_blocks(seen, queries=queries, keys=keys)[0]
    np.testing.assert_array_equal(ends, len(blocks) - blocks[::-1].argmax(axis=0))
