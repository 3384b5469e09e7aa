"""Kernels of prefill blocks: interpreted against float64, and lowered for platforms that are not there."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from platforms import lowered_for
from projections import as_they_are

from pat_jax.models.cache.paged_layer import NULL_PAGE, PagedLayer
from pat_jax.models.kernels.kernel_choice import ANYWHERE, PLAIN, Kernels
from pat_jax.models.kernels.paged_prefill import attend_blocks_on_gpu, fits_gpu
from pat_jax.models.kernels.paged_tpu import attend_blocks_on_tpu, fits_tpu

PAGE_SIZE, WIDTH, DIM = 16, 11, 128  # pages of no whole number of turns
TOLERANCE = {"float32": 3e-6, "bfloat16": 2e-2}


def on_gpu(*arguments):
    return attend_blocks_on_gpu(*arguments, interpret=True)


def on_tpu(*arguments):
    with pltpu.force_tpu_interpret_mode():
        return attend_blocks_on_tpu(*arguments)


class Blocks:
    """Random blocks of queries against a pool of refuse in which their sequences have their pages."""

    def __init__(
        self,
        seed: int,
        starts: list[int | None],
        heads: int,
        group: int,
        dtype: str,
        trunks: list[int] | None = None,
    ):
        """
        Args:
          starts: of each block; None for one that is empty.
          trunks: of each block, which is then a line of tokens with a branch behind so many.
        """
        rng = np.random.default_rng(seed)
        self.starts, self.trunks = starts, trunks

        def normal(*shape: int) -> Any:
            return jnp.asarray(rng.normal(size=shape), dtype)

        rows = len(starts)
        self.queries = normal(rows, PAGE_SIZE, heads, group, DIM)
        self.keys, self.values = (normal(rows * WIDTH + 1, heads, PAGE_SIZE, DIM) for _ in range(2))
        self.table = (rng.permutation(rows * WIDTH) + 1).reshape(rows, WIDTH).astype(np.int32)
        for row, start in enumerate(starts):
            used = 0 if start is None else start // PAGE_SIZE + 1
            self.table[row, used:] = NULL_PAGE

    def arguments(self) -> tuple:
        start = np.array([start or 0 for start in self.starts], np.int32)
        trunks = [] if self.trunks is None else [jnp.asarray(self.trunks, jnp.int32)]
        table = jnp.asarray(self.table)
        return self.queries, self.keys, self.values, table, jnp.asarray(start), *trunks

    def seen(self, row: int, i: int) -> list[int]:
        """Places of the keys that a query sees."""
        start = self.starts[row] or 0
        trunk = PAGE_SIZE if self.trunks is None else self.trunks[row]
        begun = i + 1 if i <= trunk else 1  # a branch begins behind the first
        own = range(trunk + 1, i + 1)
        return [*range(start + begun), *[start + j for j in own]]

    def expected(self, row: int) -> np.ndarray:
        """[length, kv_heads, queries_per_kv, head_dim]"""
        queries = np.asarray(self.queries[row], np.float64)
        keys, values = (
            np.concatenate(np.asarray(pool, np.float64)[self.table[row]].swapaxes(1, 2))
            for pool in (self.keys, self.values)
        )
        out = np.empty_like(queries)
        for i in range(PAGE_SIZE):
            seen = self.seen(row, i)
            scores = np.einsum("kgd,skd->kgs", queries[i], keys[seen]) / np.sqrt(DIM)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out[i] = np.einsum("kgs,skd->kgd", weights, values[seen])
        return out


def check(kernel, blocks: Blocks, tolerance: float) -> None:
    got = kernel(*blocks.arguments())
    assert got.dtype == blocks.queries.dtype
    assert np.isfinite(np.asarray(got, np.float64)).all()  # of empty blocks too
    for row, start in enumerate(blocks.starts):
        if start is not None:
            np.testing.assert_allclose(
                np.asarray(got[row], np.float64), blocks.expected(row), atol=tolerance
            )


seeds = st.integers(0, 99)
starts = st.lists(
    st.none() | st.integers(0, WIDTH - 1).map(lambda page: page * PAGE_SIZE), min_size=3, max_size=3
)


@pytest.mark.parametrize(
    ("heads", "group", "dtype"), [(2, 1, "float32"), (2, 5, "bfloat16"), (1, 16, "float32")]
)
@settings(max_examples=4)
@given(starts=starts, seed=st.integers(0, 99))
def test_on_a_gpu_blocks_see_their_sequence_up_to_themselves(heads, group, dtype, starts, seed):
    check(on_gpu, Blocks(seed, starts, heads, group, dtype), TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("heads", "group", "dtype"),
    [pytest.param(1, 4, "float32", marks=pytest.mark.slow), (2, 5, "bfloat16")],
)
@settings(max_examples=3)
@given(starts=starts, seed=st.integers(0, 99))
def test_on_a_tpu_blocks_see_their_sequence_up_to_themselves(heads, group, dtype, starts, seed):
    # Products are bfloat16 on a TPU, by default, and so are the interpreter's.
    check(on_tpu, Blocks(seed, starts, heads, group, dtype), TOLERANCE["bfloat16"])


@pytest.mark.parametrize("kernel", [on_gpu, on_tpu])
@settings(max_examples=5)
@given(
    starts=starts, trunks=st.lists(st.integers(0, PAGE_SIZE), min_size=3, max_size=3), seed=seeds
)
def test_a_branch_does_not_see_the_trunk_beside_it(kernel, starts, trunks, seed):
    check(kernel, Blocks(seed, starts, 2, 5, "float32", trunks), TOLERANCE["bfloat16"])


@given(
    starts=starts, trunks=st.lists(st.integers(0, PAGE_SIZE), min_size=3, max_size=3), seed=seeds
)
@settings(max_examples=5)
def test_without_a_kernel_a_branch_does_not_see_it_either(starts, trunks, seed):
    def gathered(queries, keys, values, table, start, trunk):
        return PagedLayer(keys, values, table).read(queries, start, ANYWHERE, PLAIN, trunk=trunk)

    check(gathered, Blocks(seed, starts, 2, 2, "float32", trunks), TOLERANCE["float32"])


def lowered(
    platform: str, page_size: int, dim: int, group: int, dtype: str = "bfloat16", length: int = 0
) -> str:
    """One layer's attention to `length` tokens or to a page, as it is lowered for a platform."""
    length = length or page_size
    pool: Any = jax.ShapeDtypeStruct((64, 8, page_size, dim), dtype)
    table: Any = jax.ShapeDtypeStruct((4, 24), jnp.int32)
    new = jax.ShapeDtypeStruct((4, length, 8, dim), dtype)
    queries = jax.ShapeDtypeStruct((4, length, 8, group, dim), dtype)
    positions = jax.ShapeDtypeStruct((4, length), jnp.int32)
    layer = PagedLayer(pool, pool, table)
    attend = partial(PagedLayer.attend, kernels=Kernels.of(platform))
    return lowered_for(platform, attend, layer, as_they_are(queries, new, new), positions)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("group", [1, 5, 16])
@pytest.mark.parametrize(("platform", "kernel"), [("tpu", "tpu_custom_call"), ("cuda", "triton")])
def test_a_prefill_call_is_lowered_to_the_kernel_of_its_platform(platform, kernel, group, dtype):
    text = lowered(platform, 16, 128, group, dtype)
    for name in ("tpu_custom_call", "triton"):
        assert (name in text) == (name == kernel)
    # Nothing of the size of every block's whole context.
    assert f"4x8x{24 * 16}x128x" not in text


@pytest.mark.parametrize("length", [1, 0])
@pytest.mark.parametrize("platform", ["tpu", "cuda", "cpu"])
@pytest.mark.parametrize(("page_size", "dim"), [(12, 128), (16, 80), (16, 8)])
def test_shapes_that_no_kernel_takes_are_gathered(platform, page_size, dim, length):
    fits = {"tpu": fits_tpu, "cuda": fits_gpu, "cpu": lambda *_: False}[platform]
    assert not fits(page_size, dim)
    text = lowered(platform, page_size, dim, group=4, length=length)
    assert "custom_call" not in text and f"4x8x{24 * page_size}x{dim}x" in text
