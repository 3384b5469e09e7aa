"""Pages, and the dense view of them during a burst, against attention over plain lists in float64."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from platforms import lowered_for
from projections import as_they_are

from pat_jax.models.cache.burst_layer import BurstLayer
from pat_jax.models.cache.paged_layer import NULL_PAGE, PagedLayer, _write_at_once, _write_in_turn
from pat_jax.models.kernels import paged_prefill as block_kernels
from pat_jax.models.kernels import paged_tpu
from pat_jax.models.kernels.join_parts_gpu import join_parts
from pat_jax.models.kernels.kernel_choice import ANYWHERE, Kernels
from pat_jax.models.kernels.paged_prefill import attend_blocks_on_gpu

PAGE_SIZE, HEADS, GROUP, DIM, WIDTH = 4, 2, 3, 8, 5
TOLERANCE = {np.dtype(np.float32): 2e-6, np.dtype(jnp.bfloat16): 3e-2}


def expected(query, keys, values):
    """One query [heads, group, dim] over its sequence's keys and values [tokens, heads, dim]."""
    scores = np.einsum("kgd,skd->kgs", query, keys) / np.sqrt(query.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("kgs,skd->kgd", weights / weights.sum(axis=-1, keepdims=True), values)


class Sequences:
    """Rows of random keys, values and queries, and a pool that holds the first tokens of each."""

    def __init__(self, seed, lengths, new, dtype=jnp.float32):
        rng = np.random.default_rng(seed)
        self.lengths, self.new = np.array(lengths, np.int32), new
        rows, total = len(lengths), max(lengths) + new

        def normal(*shape):
            return np.asarray(jnp.asarray(rng.normal(size=shape), dtype), np.float64)

        self.keys, self.values = normal(rows, total, HEADS, DIM), normal(rows, total, HEADS, DIM)
        self.queries = normal(rows, total, HEADS, GROUP, DIM)
        pages = rng.permutation(rows * WIDTH) + 1
        self.table = pages.reshape(rows, WIDTH).astype(np.int32)
        for row, length in enumerate(lengths):
            self.table[row, -(-(length + new) // PAGE_SIZE) :] = NULL_PAGE
        # What no sequence owns is refuse; it may be of any size but not infinite.
        shape = (rows * WIDTH + 1, HEADS, PAGE_SIZE, DIM)
        self.pools = [np.asarray(1e3 * rng.normal(size=shape), dtype) for _ in range(2)]
        for row, length in enumerate(lengths):
            for token in range(length):
                self.put(self.pools, row, token)

    def put(self, pools, row, token):
        page, column = self.table[row, token // PAGE_SIZE], token % PAGE_SIZE
        pools[0][page, :, column] = self.keys[row, token]
        pools[1][page, :, column] = self.values[row, token]

    def layer(self):
        keys, values = map(jnp.asarray, self.pools)
        return PagedLayer(keys, values, jnp.asarray(self.table))

    def chunk(self, positions, dtype):
        """Queries, keys and values at positions int[rows, length]."""
        at = (np.arange(len(positions))[:, None], positions)
        arrays = [jnp.asarray(x[at], dtype) for x in (self.queries, self.keys, self.values)]
        return (*arrays, jnp.asarray(positions, jnp.int32))

    def expected(self, row, position):
        seen = slice(position + 1)
        return expected(self.queries[row, position], self.keys[row, seen], self.values[row, seen])


# Always three rows, and jitted once a shape: what varies compiles nothing.
lengths = st.lists(st.integers(0, PAGE_SIZE * WIDTH - 7), min_size=3, max_size=3)


@jax.jit
def attend(cache: Any, queries: Any, keys: Any, values: Any, positions: Any) -> Any:
    return cache.attend(as_they_are(queries, keys, values), positions, ANYWHERE)


begin = jax.jit(BurstLayer.begin, static_argnums=2)
end = jax.jit(BurstLayer.end)
write_at_once, write_in_turn = map(jax.jit, (_write_at_once, _write_in_turn))


@given(lengths, st.integers(0, 99), st.sampled_from([jnp.float32, jnp.bfloat16]))
def test_decoding_over_pages_equals_attention_over_the_sequence(lengths, seed, dtype):
    sequences = Sequences(seed, lengths, new=3, dtype=dtype)
    layer = sequences.layer()
    for step in range(3):
        positions = sequences.lengths[:, None] + step
        got, layer = attend(layer, *sequences.chunk(positions, dtype))
        assert got.dtype == dtype
        for row, position in enumerate(positions[:, 0]):
            np.testing.assert_allclose(
                np.asarray(got[row, 0], np.float64),
                sequences.expected(row, position),
                atol=TOLERANCE[np.dtype(dtype)],
            )


@given(st.permutations(range(4)), st.integers(0, 99))
def test_blocks_of_one_sequence_may_be_prefilled_in_one_call_in_any_order(order, seed):
    """And an empty block, whose table names no page, disturbs nobody."""
    sequences = Sequences(seed, [0], new=4 * PAGE_SIZE)
    starts = np.array([*order, 0])[:, None] * PAGE_SIZE
    positions = starts + np.arange(PAGE_SIZE)
    at = (np.zeros_like(positions), positions)
    layer = sequences.layer()._replace(
        table=jnp.asarray(np.vstack([np.repeat(sequences.table, 4, axis=0), [[NULL_PAGE] * WIDTH]]))
    )
    chunk = [jnp.asarray(x[at], jnp.float32) for x in (sequences.queries, sequences.keys)]
    values = jnp.asarray(sequences.values[at], jnp.float32)
    got, _ = attend(layer, *chunk, values, jnp.asarray(positions))
    assert np.isfinite(got).all()
    for block, start in enumerate(starts[:-1, 0]):
        for i in range(PAGE_SIZE):
            np.testing.assert_allclose(got[block, i], sequences.expected(0, start + i), atol=2e-6)


@given(
    lengths,
    st.data(),
    st.sampled_from([jnp.float32, jnp.bfloat16]),
)
def test_a_burst_equals_attention_over_the_sequence_and_leaves_its_tokens_in_the_pages(
    lengths, data, dtype
):
    """Rows end at different steps; those that have ended stand still and write refuse.

    The longest may fill its table; a burst may have room for more steps than a table has columns.
    """
    steps, room = data.draw(st.integers(1, 7)), data.draw(st.sampled_from([7, 50]))
    emitted = np.array([data.draw(st.integers(0, steps)) for _ in lengths], np.int32)
    sequences = Sequences(data.draw(st.integers(0, 99)), lengths, new=7, dtype=dtype)
    layer, start = sequences.layer(), sequences.lengths
    burst = begin(layer, jnp.asarray(start), room)
    for step in range(emitted.max()):
        positions = start + np.minimum(step, emitted)
        got, burst = attend(burst, *sequences.chunk(positions[:, None], dtype))
        assert got.dtype == dtype
        for row in np.flatnonzero(step < emitted):
            np.testing.assert_allclose(
                np.asarray(got[row, 0], np.float64),
                sequences.expected(row, positions[row]),
                atol=TOLERANCE[np.dtype(dtype)],
            )

    for row, count in enumerate(emitted):
        for token in range(start[row], start[row] + count):
            sequences.put(sequences.pools, row, token)
    ended = end(burst, layer, jnp.asarray(start + emitted))
    for got, pool in zip((ended.keys, ended.values), sequences.pools, strict=True):
        np.testing.assert_array_equal(got[NULL_PAGE + 1 :], pool[NULL_PAGE + 1 :])


def gpu_interpreted(*arguments):
    return attend_blocks_on_gpu(*arguments, interpret=True)


def tpu_interpreted(*arguments):
    with pltpu.force_tpu_interpret_mode():
        return paged_tpu.attend_blocks_on_tpu(*arguments)


def gpu_split(*arguments):
    """A page at once: rows of one, three and five turns by four parts, of which some are empty."""
    jitted: Any = block_kernels.attend_blocks_on_gpu
    jitted.clear_cache()  # it knows nothing of other constants
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_kernels, "GPU_KEYS", 16)
        patch.setattr(block_kernels, "GPU_PARTS", 4)
        return gpu_interpreted(*arguments)


def tpu_in_turns(*arguments):
    """Two pages at once: rows of one, two and three turns, whose pages wait in three buffers."""
    jitted: Any = paged_tpu.attend_blocks_on_tpu
    jitted.clear_cache()  # it knows nothing of other constants
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_tpu, "MOST_KEYS", 32)
        return tpu_interpreted(*arguments)


# Products are bfloat16 on a TPU, by default, and so are the interpreter's.
@pytest.mark.parametrize(
    ("kernel", "tolerance"),
    [
        (gpu_interpreted, 2e-6),
        (gpu_split, 2e-6),
        (tpu_interpreted, 2e-2),
        (tpu_in_turns, 2e-2),
    ],
)
def test_kernels_equal_attention_over_the_sequence(kernel, tolerance):
    """Lengths of one token, inside and at the end of a page; heads that share keys."""
    rng = np.random.default_rng(0)
    rows, width, page_size, dim = 3, 5, 16, 128
    lengths, pages = np.array([1, 37, 80], np.int32), rows * width + 1
    queries = rng.normal(size=(rows, 1, HEADS, GROUP, dim))
    keys, values = rng.normal(size=(2, pages, HEADS, page_size, dim))
    table = (rng.permutation(rows * width) + 1).reshape(rows, width).astype(np.int32)
    arrays = [jnp.asarray(x, jnp.float32) for x in (queries, keys, values)]
    got = kernel(*arrays, jnp.asarray(table), jnp.asarray(lengths - 1))
    for row, length in enumerate(lengths):
        seen = [np.concatenate(x[table[row]].swapaxes(1, 2))[:length] for x in (keys, values)]
        np.testing.assert_allclose(got[row, 0], expected(queries[row, 0], *seen), atol=tolerance)


@pytest.mark.parametrize(
    ("rows", "heads", "tokens", "parts"),
    [(1, 1, 24_576, 128), (1, 1, 1024, 16), (1, 8, 24_576, 64), (8, 8, 24_576, 16)],
)
def test_the_keys_of_few_rows_are_split_until_a_gpu_is_full(rows, heads, tokens, parts):
    """Even if TP leaves a device one KV head, but never into parts without keys."""
    width = tokens // 16
    pool: Any = jax.ShapeDtypeStruct((rows * width + 1, heads, 16, 128), jnp.bfloat16)
    queries: Any = jax.ShapeDtypeStruct((rows, 1, heads, 4, 128), jnp.bfloat16)
    table: Any = jax.ShapeDtypeStruct((rows, width), jnp.int32)
    start: Any = jax.ShapeDtypeStruct((rows,), jnp.int32)
    traced = jax.make_jaxpr(attend_blocks_on_gpu)(queries, pool, pool, table, start)
    (split,) = set(re.findall(rf"bf16\[(\d+),{rows},{heads},16,128\]", str(traced)))
    assert int(split) == parts


def test_a_row_in_128_parts_attends_to_all_its_keys():
    rng = np.random.default_rng(1)
    width, page_size, length, dim = 128, 16, 1999, 16
    queries = rng.normal(size=(1, 1, 1, GROUP, dim))
    keys, values = rng.normal(size=(2, width + 1, 1, page_size, dim))
    table = rng.permutation(width)[None].astype(np.int32) + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_kernels, "GPU_KEYS", page_size)
        arrays = [jnp.asarray(x, jnp.float32) for x in (queries, keys, values)]
        got = gpu_interpreted(*arrays, jnp.asarray(table), jnp.asarray([length - 1], jnp.int32))
    seen = [np.concatenate(x[table[0]].swapaxes(1, 2))[:length] for x in (keys, values)]
    np.testing.assert_allclose(got[0, 0], expected(queries[0, 0], *seen), atol=2e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("parts", [2, 16])
def test_joined_parts_are_the_attention_to_all_their_keys(parts, dtype):
    """Of 5 queries in a tile of 16. The rows have keys in one part, in some, and in all of them."""
    rng = np.random.default_rng(parts)
    with_keys = np.array([1, parts // 2 + 1, parts])
    is_empty = np.arange(parts)[:, None] >= with_keys
    scores = rng.normal(size=(parts, len(with_keys), HEADS, 16, 7)) * 3
    values = rng.normal(size=(*scores.shape, DIM))
    weights = np.where(is_empty[..., None, None, None], 0, np.exp(scores))
    totals = weights.sum(axis=-1)
    sums = np.einsum("prhqs,prhqsd->prhqd", weights, values)
    of_parts = sums / np.where(totals == 0, 1, totals)[..., None]
    with np.errstate(divide="ignore"):
        logsumexp = jnp.asarray(np.log(totals), jnp.float32)
    got = join_parts(jnp.asarray(of_parts, dtype), logsumexp, 5, interpret=True)
    assert got.dtype == dtype
    wanted = (sums.sum(axis=0) / totals.sum(axis=0)[..., None])[:, :, :5]
    tolerance = TOLERANCE[np.dtype(dtype)]
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, atol=tolerance)


@pytest.mark.parametrize(
    ("platform", "kernel"), [("tpu", "tpu_custom_call"), ("cuda", "triton"), ("cpu", None)]
)
def test_a_decode_step_is_lowered_to_the_kernel_of_its_platform(platform, kernel):
    pool: Any = jax.ShapeDtypeStruct((64, 8, 16, 128), jnp.bfloat16)
    table: Any = jax.ShapeDtypeStruct((4, 8), jnp.int32)
    layer = PagedLayer(pool, pool, table)
    token = jax.ShapeDtypeStruct((4, 1, 8, 128), jnp.bfloat16)
    queries = jax.ShapeDtypeStruct((4, 1, 8, 4, 128), jnp.bfloat16)
    positions = jax.ShapeDtypeStruct((4, 1), jnp.int32)
    attend = partial(PagedLayer.attend, kernels=Kernels.of(platform))
    text = lowered_for(platform, attend, layer, as_they_are(queries, token, token), positions)
    for name in ("tpu_custom_call", "triton"):
        assert (name in text) == (name == kernel)
    # On a TPU the tokens are written as rows of one matrix: else it lays the pool out anew each step.
    written = "(tensor<8192x128xbf16>, tensor<32x1xi32>, tensor<32x128xbf16>)"
    assert text.count(written) == 2 * (platform == "tpu")


@given(st.permutations(range(6)), st.integers(0, 99))
def test_both_ways_to_write_pages_write_the_same(pages, seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, PAGE_SIZE, endpoint=True))  # up to whole pages
    pool = jnp.asarray(rng.normal(size=(6, HEADS, PAGE_SIZE, DIM)))
    chunks = jnp.asarray(rng.normal(size=(3, HEADS, count, DIM)))
    offsets = rng.integers(0, PAGE_SIZE - count, 3, endpoint=True)
    at = jnp.asarray(pages[:3]), jnp.asarray(offsets)
    np.testing.assert_array_equal(
        write_at_once(pool, chunks, *at), write_in_turn(pool, chunks, *at)
    )


def test_a_row_that_stands_behind_its_table_spoils_no_page():
    """As one does that has used up its budget before the other rows' burst is over."""
    rng = np.random.default_rng(0)
    pool = jnp.asarray(rng.normal(size=(3, HEADS, PAGE_SIZE, DIM)), jnp.float32)
    layer = PagedLayer(pool, pool, jnp.array([[1, 2]]))
    token = jnp.ones((1, 1, HEADS, DIM))
    queries = jnp.ones((1, 1, HEADS, 2, DIM))
    position = jnp.array([[2 * PAGE_SIZE]])
    attended, written = attend(layer, queries, token, token, position)
    np.testing.assert_array_equal(written.keys[1:], pool[1:])
    assert np.isfinite(attended).all()
