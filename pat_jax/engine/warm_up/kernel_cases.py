"""The inputs on which each kernel is compared with plain JAX operations.

A case of attention has the shapes of one device's part of a model, and random numbers. Its rows
begin, end and branch at page borders and elsewhere. Cases of experts have experts with no, few and
many rows. Does not know whether a kernel is right.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pat_jax.layout.layout import Layout
from pat_jax.models.cache.paged_layer import NULL_PAGE, PagedLayer, takes
from pat_jax.models.config import ModelConfig
from pat_jax.models.kernels.expert_mlp import mlp_by_expert, takes_weight
from pat_jax.models.kernels.grouped import tile_size
from pat_jax.models.kernels.kernel_choice import PALLAS, Kernels
from pat_jax.models.kernels.row_attention import attend_rows, knows_branches
from pat_jax.models.layers import Rotation
from pat_jax.models.projected import Projected
from pat_jax.models.weight_formats import WeightFormat, abstract_weight, stored

TOKENS = 320  # of a row: more keys than one block of a GPU's or a TPU's kernel has
ENDS = [1, 2, 3, 5, 17, 33, 200, TOKENS]  # lengths of decoding rows; short ones show every key
EPS = 1e-6  # of the norms of heads
TURNS = 6  # tokens of a row that a step verifies
SHARP = 2.0  # scales attention scores: if they were more even, a missing key would not show
EXPERTS, PER_TOKEN = 4, 2  # the last expert has no row
SIDE = 1024  # largest side of an expert's weights, about: more would only add turns of loops
# Numbers of tokens as in decoding, a prefill and training: they use tiles of each size.
ROUTED = {"experts of few rows": 8, "experts of some rows": 100, "experts of many rows": TOKENS}


@dataclass(frozen=True)
class Part:
    """The shape of a model's attention on one device, and of its experts."""

    kv_heads: int
    queries_per_kv: int
    head_dim: int
    page_size: int
    dtype: str
    expert_sides: tuple[int, int] | None = None  # width of an expert's input, and of the expert
    weights: WeightFormat = "auto"  # format of the experts' weights in rollouts

    def __str__(self) -> str:
        heads = f"{self.queries_per_kv} query heads on each of {self.kv_heads} KV heads"
        experts = f", experts of {self.expert_sides[1]}" if self.expert_sides else ""
        return f"{heads} of {self.head_dim}, pages of {self.page_size}{experts}, {self.dtype}"


def parts_of(
    layouts: Iterable[Layout],
    model: ModelConfig,
    page_size: int,
    dtype: jnp.dtype,
    weights: WeightFormat = "auto",
) -> list[Part]:
    """Returns the shapes in the layouts with the least and the most TP.

    Layouts between them use the same kernels. The first shape includes the experts, which are the
    same in all layouts."""
    first, *_, last = [*layouts] * 2
    attention = [
        Part(
            max(model.num_kv_heads // layout.size(layout.kv_axes), 1),
            max(model.padded_queries_per_kv // layout.size(layout.query_axes), 1),
            model.head_dim,
            page_size,
            jnp.dtype(dtype).name,
        )
        for layout in (first, last)
    ]
    parts = list(dict.fromkeys(attention))
    if model.experts:
        sides = model.expert_embed_dim, model.experts.expert_dim
        parts[0] = replace(parts[0], expert_sides=sides, weights=weights)
    return parts


class Case(NamedTuple):
    """One comparison: a function of kernels and arrays, and the arrays, those of one device."""

    name: str
    kernel: str  # its name in `Kernels`
    run: Callable[..., Any]
    arrays: Sequence[np.ndarray]  # floats are rounded to the part's type before use
    floor: float = 0.1  # share of a usual row's norm, added to a row's norm in relative errors


def cases_of(part: Part, kernels: Kernels) -> list[Case]:
    """Returns the cases for every kernel of `kernels` that supports the part's shape."""
    over_pages = [
        Case("decode", "decode", _over_pages, _pages(part, ENDS, 1)),
        Case("prefill", "prefill", _over_pages, _prefill(part)),
        Case("verify", "verify", _over_pages, _verify(part)),
        *([Case("append", "decode", _append, _tokens(part))] if kernels.adds_parts else ()),
    ]
    rows = [
        Case("rows forward", "rows", _rows_forward, _rows(part, kernels.platform)),
        # A query with one key has a gradient of 0, computed as a difference of larger numbers.
        Case("rows backward", "rows", _rows_backward, _rows(part, kernels.platform), floor=1.0),
    ]
    fits = kernels.chosen and takes(kernels.platform, part.page_size, part.head_dim)
    every = [*(over_pages if fits else ()), *rows, *_of_experts(part, kernels)]
    return [x for x in every if x.kernel in kernels.chosen]


def _of_experts(part: Part, kernels: Kernels) -> list[Case]:
    if part.expert_sides is None or kernels.experts != PALLAS:
        return []
    embed, dim = (min(side, SIDE + side % 128) for side in part.expert_sides)
    shapes = [(EXPERTS, dim, embed), (EXPERTS, dim, embed), (EXPERTS, embed, dim)]
    rng = np.random.default_rng(2)
    stacks = [(rng.normal(size=of) / of[-1] ** 0.5).astype(np.float32) for of in shapes]
    forward = partial(_experts_forward, part.weights)
    arrays = {name: _routed(embed, rows) + stacks for name, rows in ROUTED.items()}
    found = [Case(name, "experts", forward, each) for name, each in arrays.items()]
    many = _routed(embed, TOKENS) + stacks
    backward = Case("experts backward", "experts", _experts_backward, many, floor=1.0)

    def are_taken(weights: WeightFormat) -> bool:
        return all(takes_weight(kernels, abstract_weight(of, 1, weights)) for of in shapes)

    return found * are_taken(part.weights) + [backward] * are_taken("auto")


def _over_pages(kernels: Kernels, name: str, *arrays: Array) -> Array:
    queries, keys, values, table, start, *trunk = arrays
    layer = PagedLayer(keys, values, table)
    way = kernels.way(name)
    return layer.read(queries, start, kernels, way, trunk=trunk[0] if trunk else None)


def _append(kernels: Kernels, name: str, *arrays: Array) -> tuple[Array, ...]:
    heads, keys, values, table, start, cos, sin, *norms = arrays
    _, rows, length, _, dim = heads.shape
    count = keys.shape[1]
    whole = jnp.sum(heads, axis=0)
    queries = jnp.reshape(whole[:, :, : -2 * count], (rows, length, count, -1, dim))
    each = queries, whole[:, :, -2 * count : -count], whole[:, :, -count:]
    new = Projected(*each, Rotation(cos, sin), (norms[0], norms[1]), EPS, (heads,))
    queries, layer = PagedLayer(keys, values, table).append(new, start, kernels)
    return queries, layer.keys, layer.values


def _rows_forward(kernels: Kernels, name: str, *arrays: Array) -> Array:
    queries, keys, values, _, positions = arrays
    return attend_rows(queries, keys, values, positions, kernels=kernels)


def _rows_backward(kernels: Kernels, name: str, *arrays: Array) -> tuple[Array, ...]:
    queries, keys, values, grads, positions = arrays

    def attend(queries: Array, keys: Array, values: Array) -> Array:
        return attend_rows(queries, keys, values, positions, kernels=kernels)

    return jax.vjp(attend, queries, keys, values)[1](grads)


def _experts_forward(weights: WeightFormat, kernels: Kernels, name: str, *arrays: Array) -> Array:
    """Computes experts whose weights are stored in the format `weights`."""
    x, _, chosen, shares, *experts = arrays
    gate, up, down = (stored(w, abstract_weight(w.shape, 1, weights), w.dtype) for w in experts)
    size = tile_size(len(x), PER_TOKEN, EXPERTS)
    return mlp_by_expert((gate, up, down), x, chosen, shares, size, kernels)


def _experts_backward(kernels: Kernels, name: str, *arrays: Array) -> tuple[Array, ...]:
    x, grads, chosen, shares, *experts = arrays

    def compute(x: Array, *experts: Array) -> Array:
        return _experts_forward("auto", kernels, name, x, grads, chosen, shares, *experts)

    return jax.vjp(compute, x, *experts)[1](grads)


def _pages(part: Part, ends: Sequence[int], queries: int) -> list[np.ndarray]:
    """Queries, keys, values, page tables, and the position of each row's first query.

    Row r has `ends[r]` tokens. Pages that no row owns hold wrong values."""
    rng = np.random.default_rng(0)
    rows = len(ends)
    width = -(-TOKENS // part.page_size)
    table = (rng.permutation(rows * width) + 1).reshape(rows, width).astype(np.int32)
    for row, end in enumerate(ends):
        table[row, -(-end // part.page_size) :] = NULL_PAGE
    pool = rows * width + 1, part.kv_heads, part.page_size, part.head_dim
    keys, values = rng.normal(size=(2, *pool)).astype(np.float32)
    unowned = np.setdiff1d(np.arange(1, len(keys)), table)
    keys[unowned] = 10
    values[unowned] = 10
    shape = rows, queries, part.kv_heads, part.queries_per_kv, part.head_dim
    start = np.array(ends, np.int32) - queries
    asked = SHARP * rng.normal(size=shape).astype(np.float32)
    return [asked, keys, values, table, start]


def _tokens(part: Part) -> list[np.ndarray]:
    """A token of each row as two parts of its heads, pages, and what norms and rotates heads."""
    rng = np.random.default_rng(4)
    _, keys, values, table, start = _pages(part, ENDS, 1)
    rows, dim = len(table), part.head_dim
    heads = rng.normal(size=(2, rows, 1, part.kv_heads * (part.queries_per_kv + 2), dim))
    angles = rng.uniform(0, 2 * np.pi, (rows, 1, dim // 2))
    floats = [heads, np.cos(angles), np.sin(angles), *rng.uniform(0.5, 2, (2, dim))]
    heads, *others = (x.astype(np.float32) for x in floats)
    return [heads, keys, values, table, start, *others]


def _prefill(part: Part) -> list[np.ndarray]:
    """Inputs of a prefill: a page of queries for each row."""
    size = part.page_size
    most = TOKENS // size
    return _pages(part, [size * n for n in (1, 2, most // 2, most)], size)


def _verify(part: Part) -> list[np.ndarray]:
    """Inputs of rows with no branch, with one longer than the trunk, and with one of one token."""
    ends = [TURNS, 17 + TURNS, 200, TOKENS]
    return [*_pages(part, ends, TURNS), np.array([TURNS - 1, 1, 4, 0], np.int32)]


def _rows(part: Part, platform: str) -> list[np.ndarray]:
    """Queries, keys, values, gradients and positions of rows with several sequences."""
    rng = np.random.default_rng(1)
    kv = part.kv_heads
    dim = part.head_dim
    branching = [*range(100), *range(60, 110), *range(60, 150)]
    first = branching if knows_branches(platform) else [*range(100), *range(140)]
    positions = np.zeros((2, TOKENS), np.int32)
    positions[0, : len(first)] = first
    positions[1, : TOKENS - 1] = np.arange(TOKENS - 1)
    queries = (2, TOKENS, kv, part.queries_per_kv, dim)
    context = (2, kv, TOKENS, dim)
    shapes = queries, context, context, queries
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    return [SHARP * arrays[0], *arrays[1:], positions]


def _routed(embed: int, rows: int) -> list[np.ndarray]:
    """Rows, gradients, each row's experts (-1: on another device), and their routing weights."""
    rng = np.random.default_rng(3)
    x, grads = rng.normal(size=(2, rows, embed)).astype(np.float32)
    chosen = rng.integers(-1, EXPERTS - 1, (rows, PER_TOKEN)).astype(np.int32)
    return [x, grads, chosen, rng.uniform(0.2, 1, chosen.shape).astype(np.float32)]
