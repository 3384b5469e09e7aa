"""What each kernel is asked to compute where it is held against plain operations.

One device's part of the attention of a model: random numbers over rows that begin, end and branch
at pages' borders and elsewhere. Does not know whether a kernel is right.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pat_jax.layout.layout import Layout
from pat_jax.models.cache.paged_layer import NULL_PAGE, PagedLayer, takes
from pat_jax.models.config import ModelConfig
from pat_jax.models.kernels.kernel_choice import Kernels
from pat_jax.models.kernels.row_attention import attend_rows, knows_branches

TOKENS = 320  # of a row: more keys than a GPU's kernel takes at once, a block and more of a TPU's
ENDS = [1, 2, 3, 5, 17, 33, 200, TOKENS]  # of rows that decode: in short ones each key shows
TURNS = 6  # tokens of a row that a step verifies
SHARP = 2.0  # of scores: with more even ones a key too few would not show


@dataclass(frozen=True)
class Part:
    """The part of a model's attention that one device computes."""

    kv_heads: int
    queries_per_kv: int
    head_dim: int
    page_size: int
    dtype: str

    def __str__(self) -> str:
        heads = f"{self.queries_per_kv} query heads on each of {self.kv_heads} KV heads"
        return f"{heads} of {self.head_dim}, pages of {self.page_size}, {self.dtype}"


def parts_of(
    layouts: Iterable[Layout], model: ModelConfig, page_size: int, dtype: jnp.dtype
) -> list[Part]:
    """Parts of the layouts with the least and the most TP: those between have the same kernels."""
    first, *_, last = [*layouts] * 2
    parts = [
        Part(
            max(model.num_kv_heads // layout.size(layout.kv_axes), 1),
            max(model.padded_queries_per_kv // layout.size(layout.query_axes), 1),
            model.head_dim,
            page_size,
            jnp.dtype(dtype).name,
        )
        for layout in (first, last)
    ]
    return list(dict.fromkeys(parts))


class Case(NamedTuple):
    """A function of kernels and arrays, and the arrays, as one device has them."""

    name: str
    kernel: str  # of those that `Kernels` names
    run: Callable[..., Any]
    arrays: Sequence[np.ndarray]  # floats are to be rounded to the part's type
    floor: float = 0.1  # of a usual result's size: what a small one's error is held against


def cases_of(part: Part, kernels: Kernels) -> list[Case]:
    """For every kernel of `kernels` that takes that shape."""
    over_pages = [
        Case("decode", "decode", _over_pages, _pages(part, ENDS, 1)),
        Case("prefill", "prefill", _over_pages, _prefill(part)),
        Case("verify", "verify", _over_pages, _verify(part)),
    ]
    rows = [
        Case("rows forward", "rows", _rows_forward, _rows(part, kernels.platform)),
        # A query that sees one key has a gradient of 0, of numbers that are none.
        Case("rows backward", "rows", _rows_backward, _rows(part, kernels.platform), floor=1.0),
    ]
    fits = kernels.chosen and takes(kernels.platform, part.page_size, part.head_dim)
    return [x for x in (*(over_pages if fits else ()), *rows) if x.kernel in kernels.chosen]


def _over_pages(kernels: Kernels, name: str, *arrays: Array) -> Array:
    queries, keys, values, table, start, *trunk = arrays
    layer, way = PagedLayer(keys, values, table), kernels.way(name)
    return layer.read(queries, start, kernels, way, trunk=trunk[0] if trunk else None)


def _rows_forward(kernels: Kernels, name: str, *arrays: Array) -> Array:
    queries, keys, values, _, positions = arrays
    return attend_rows(queries, keys, values, positions, kernels=kernels)


def _rows_backward(kernels: Kernels, name: str, *arrays: Array) -> tuple[Array, ...]:
    queries, keys, values, grads, positions = arrays

    def attend(queries: Array, keys: Array, values: Array) -> Array:
        return attend_rows(queries, keys, values, positions, kernels=kernels)

    return jax.vjp(attend, queries, keys, values)[1](grads)


def _pages(part: Part, ends: Sequence[int], queries: int) -> list[np.ndarray]:
    """Queries, a pool, tables, and where each row's queries begin; their last is token `ends[r]`.

    What no row owns is refuse.
    """
    rng, rows = np.random.default_rng(0), len(ends)
    width = -(-TOKENS // part.page_size)
    table = (rng.permutation(rows * width) + 1).reshape(rows, width).astype(np.int32)
    for row, end in enumerate(ends):
        table[row, -(-end // part.page_size) :] = NULL_PAGE
    pool = rows * width + 1, part.kv_heads, part.page_size, part.head_dim
    keys, values = rng.normal(size=(2, *pool)).astype(np.float32)
    unowned = np.setdiff1d(np.arange(1, len(keys)), table)
    keys[unowned], values[unowned] = 10, 10
    shape = rows, queries, part.kv_heads, part.queries_per_kv, part.head_dim
    start = np.array(ends, np.int32) - queries
    asked = SHARP * rng.normal(size=shape).astype(np.float32)
    return [asked, keys, values, table, start]


def _prefill(part: Part) -> list[np.ndarray]:
    """A page of queries each; the last row's is not the last of its pages."""
    size = part.page_size
    most = TOKENS // size
    return _pages(part, [size * n for n in (1, 2, most // 2, most)], size)


def _verify(part: Part) -> list[np.ndarray]:
    """Rows without a branch, with one that is longer than the trunk, and with one of a token."""
    ends = [TURNS, 17 + TURNS, 200, TOKENS]
    return [*_pages(part, ends, TURNS), np.array([TURNS - 1, 1, 4, 0], np.int32)]


def _rows(part: Part, platform: str) -> list[np.ndarray]:
    """Queries, keys, values, gradients and positions of rows with several sequences."""
    rng, kv, dim = np.random.default_rng(1), part.kv_heads, part.head_dim
    branching = [*range(100), *range(60, 110), *range(60, 150)]
    first = branching if knows_branches(platform) else [*range(100), *range(140)]
    positions = np.zeros((2, TOKENS), np.int32)
    positions[0, : len(first)] = first
    positions[1, : TOKENS - 1] = np.arange(TOKENS - 1)
    queries, context = (2, TOKENS, kv, part.queries_per_kv, dim), (2, kv, TOKENS, dim)
    shapes = queries, context, context, queries
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    return [SHARP * arrays[0], *arrays[1:], positions]
