"""The paged KV cache: one layer's pool, and the block table that lists each row's pages.

`burst_layer.py` and `draft_layer.py` implement the same interface (`LayerCache`).

A page holds `page_size` consecutive tokens of one sequence. Entry w of a row's table is the page of
its tokens w * page_size … (w + 1) * page_size - 1. Page NULL_PAGE belongs to no sequence: entries
beyond a row's tokens name it, and empty rows read and write it; it stays zero.

On any back end, plain operations gather each row's pages and attend over them as dense rows. On a
TPU or an NVIDIA GPU, kernels read the pages in place: `paged_tpu` on a TPU, `paged_prefill` on a
GPU. `Kernels` says whether plain operations or kernels are used.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pat_jax.models.kernels.append_gpu import append_on_gpu
from pat_jax.models.kernels.kernel_choice import PALLAS, Kernels, Way
from pat_jax.models.kernels.paged_prefill import attend_blocks_on_gpu, fits_gpu
from pat_jax.models.kernels.paged_tpu import attend_blocks_on_tpu, fits_tpu
from pat_jax.models.layers import attend, attend_where, sees
from pat_jax.models.projected import Projected

KV_AXES = ("pages", "kv_heads", None, None)
NULL_PAGE = 0  # a page of every pool that empty rows read and write


class LayerCache(Protocol):
    """The keys and values of one layer. The model calls only `attend`."""

    def attend(
        self, new: Projected, positions: Int[Array, "rows length"], kernels: Kernels
    ) -> tuple[Float[Array, "rows length kv_heads queries_per_kv head_dim"], Self]:
        """Stores the keys and values of consecutive tokens, then computes attention.

        Each query sees all keys in its row up to its own position.

        Args:
          new: queries, keys and values, to which the cache applies norms and rotation.
        """
        ...


class PageKernels(NamedTuple):
    """The attention kernels of one platform, with the arguments of `_attend_plainly`."""

    decode: Callable[..., Array]  # for blocks of one query
    blocks: Callable[..., Array]  # for prefill and for verifying drafts
    fits: Callable[[int, int], bool]  # whether the kernels support a page size and head dimension
    append: Callable[..., Any] | None = None  # for single tokens; without it XLA appends them


_ON_GPU = PageKernels(attend_blocks_on_gpu, attend_blocks_on_gpu, fits_gpu, append_on_gpu)
_INTERPRETED = partial(attend_blocks_on_gpu, interpret=True)
KERNELS: Mapping[str, PageKernels] = {
    "gpu": _ON_GPU,
    "cuda": _ON_GPU,
    "tpu": PageKernels(attend_blocks_on_tpu, attend_blocks_on_tpu, fits_tpu),
    "cpu": PageKernels(
        _INTERPRETED, _INTERPRETED, fits_gpu, partial(append_on_gpu, interpret=True)
    ),
}


def reads_what_rows_hold(
    kernels: Kernels, page_size: int, head_dim: int, names: Collection[str] = ("decode",)
) -> bool:
    """Whether these operations read only each row's tokens, not all pages in the row's table."""
    return set(names) <= set(kernels.chosen) and takes(kernels.platform, page_size, head_dim)


def takes(platform: str, page_size: int, head_dim: int) -> bool:
    """Whether the platform's paged kernels can be lowered for this page size and head dimension."""
    return KERNELS[platform].fits(page_size, head_dim)


class PagedLayer(NamedTuple):
    keys: Float[Array, "pages kv_heads page_size head_dim"]
    values: Float[Array, "pages kv_heads page_size head_dim"]
    table: Int[Array, "rows width"]

    @property
    def page_size(self) -> int:
        return self.keys.shape[2]

    def attend(
        self, new: Projected, positions: Int[Array, "rows length"], kernels: Kernels
    ) -> tuple[Float[Array, "rows length kv_heads queries_per_kv head_dim"], "PagedLayer"]:
        """Implements `LayerCache.attend`.

        All rows write before any row attends, so several blocks of one sequence may be rows of one
        call. The caller ensures that a row's new tokens lie within one page. Without a kernel for
        these shapes, pages are gathered.
        """
        queries, cache = self.append(new, positions[:, 0], kernels)
        way = kernels.prefill if queries.shape[1] > 1 else kernels.decode
        return cache.read(queries, positions[:, 0], kernels, way), cache

    def read(
        self,
        queries: Float[Array, "rows length kv_heads queries_per_kv head_dim"],
        start: Int[Array, " rows"],
        kernels: Kernels,
        way: Way,
        *,
        trunk: Int[Array, " rows"] | None = None,
    ) -> Float[Array, "rows length kv_heads queries_per_kv head_dim"]:
        """Returns attention to the cached tokens; row r's first query is at position `start[r]`.

        Args:
          way: the value of `kernels.decode`, `.prefill` or `.verify`, whichever applies.
          trunk: number of draft tokens before a row's branch, see `layers.sees`.
        """
        compute = _attend_plainly
        is_single = queries.shape[1] == 1
        if way == PALLAS and takes(kernels.platform, self.page_size, queries.shape[-1]):
            of_platform = KERNELS[kernels.platform]
            compute = of_platform.decode if is_single else of_platform.blocks
        if is_single:
            # The position of a row that finished within a burst may be behind its last page. A row
            # without pages attends to one token.
            last = self.table.shape[1] * self.page_size - 1
            start = jnp.where(self.table[:, 0] == NULL_PAGE, 0, jnp.minimum(start, last))
            trunk = None
        return compute(queries, self.keys, self.values, self.table, start, trunk)

    def append(
        self, new: Projected, start: Int[Array, " rows"], kernels: Kernels
    ) -> tuple[Float[Array, "rows length kv_heads queries_per_kv head_dim"], "PagedLayer"]:
        """Returns the finished queries, and the cache with the tokens written as by `write`.

        A GPU that decodes by a kernel has one for single tokens, too."""
        takes_here = kernels.decode == PALLAS and takes(
            kernels.platform, self.page_size, self.keys.shape[-1]
        )
        append = KERNELS[kernels.platform].append if takes_here else None
        if append is None or new.keys.shape[1] > 1:
            queries, keys, values = new.finished()
            return queries, self.write(keys, values, start)
        pages, _ = self._place(start)
        pools = self.keys, self.values
        queries, (keys, values) = append(new, pools, pages, start, null_page=NULL_PAGE)
        return queries, PagedLayer(keys, values, self.table)

    def gather(self) -> tuple[Float[Array, "rows kv_heads length head_dim"], Array]:
        """Returns every row's keys and values as contiguous rows of width * page_size tokens."""
        return _gather(self.keys, self.table), _gather(self.values, self.table)

    def write(
        self,
        keys: Float[Array, "rows chunk kv_heads head_dim"],
        values: Float[Array, "rows chunk kv_heads head_dim"],
        start: Int[Array, " rows"],
    ) -> "PagedLayer":
        """Writes tokens start … start + chunk - 1 of each row into the page that holds them.

        Finished rows may write behind their table: zeros then go to NULL_PAGE. A NaN in that page
        would reach every row, since masked attention multiplies it by 0, which is NaN.
        """
        pages, offsets = self._place(start)
        is_null = (pages == NULL_PAGE)[:, None, None, None]

        def put(pool: Array, chunk: Array) -> Array:
            rows = jnp.where(is_null, 0, jnp.swapaxes(chunk, 1, 2).astype(pool.dtype))
            return jax.lax.platform_dependent(
                pool, rows, pages, offsets, cpu=_write_in_turn, default=_write_at_once
            )

        return PagedLayer(put(self.keys, keys), put(self.values, values), self.table)

    def token(
        self, position: Int[Array, " rows"]
    ) -> tuple[Float[Array, "rows 1 kv_heads dim"], Array]:
        """Returns the keys and values of one token of each row, in the shape that `write` takes."""
        pages, offsets = self._place(position)
        row = _matrix_rows(self.keys, pages, offsets, 1)[..., 0]
        keys, values = (jnp.reshape(x, (-1, x.shape[3]))[row] for x in (self.keys, self.values))
        return keys[:, None], values[:, None]

    def _place(self, position: Int[Array, " rows"]) -> tuple[Int[Array, " rows"], Array]:
        """Returns the page that holds one token of each row, and the token's offset in it. The page
        is NULL_PAGE if the row's table has no page for the token."""
        index = (position // self.page_size)[:, None]
        pages = jnp.take_along_axis(self.table, index, axis=1, mode="fill", fill_value=NULL_PAGE)
        return pages[:, 0], position % self.page_size


def _write_in_turn(pool: Array, chunks: Array, pages: Array, offsets: Array) -> Array:
    """Writes row by row: XLA:CPU may copy the whole pool for a scatter."""

    def write_row(row: Int[Array, ""], pool: Array) -> Array:
        chunk = jax.lax.dynamic_index_in_dim(chunks, row)
        return jax.lax.dynamic_update_slice(pool, chunk, (pages[row], 0, offsets[row], 0))

    return jax.lax.fori_loop(0, len(pages), write_row, pool)


def _write_at_once(pool: Array, chunks: Array, pages: Array, offsets: Array) -> Array:
    dim, count = pool.shape[3], chunks.shape[2]
    if count == pool.shape[2]:
        return pool.at[pages].set(chunks)
    row = _matrix_rows(pool, pages, offsets, count)
    flat = jnp.reshape(pool, (-1, dim)).at[jnp.ravel(row)].set(jnp.reshape(chunks, (-1, dim)))
    return jnp.reshape(flat, pool.shape)


def _matrix_rows(
    pool: Array, pages: Int[Array, " rows"], offsets: Int[Array, " rows"], count: int
) -> Int[Array, "rows kv_heads count"]:
    """Returns where `count` tokens of each row are in the pool reshaped to [-1, head_dim].

    With indices along two dimensions, XLA:TPU would reorder the whole pool in memory."""
    _, heads, page_size, _ = pool.shape
    of_head = pages[:, None] * heads + jnp.arange(heads)[None]
    return (of_head * page_size + offsets[:, None])[..., None] + jnp.arange(count)[None, None]


def _attend_plainly(
    queries: Array,
    keys: Array,
    values: Array,
    table: Array,
    start: Array,
    trunk: Array | None = None,
) -> Array:
    keys, values = PagedLayer(keys, values, table).gather()
    turn = jnp.arange(queries.shape[1])
    if trunk is None:
        return attend(queries, keys, values, start[:, None] + turn[None])
    column = jnp.arange(keys.shape[2])
    start = start[:, None, None]
    trunk = trunk[:, None, None]
    is_visible = sees(turn[None, :, None], column[None, None], start, trunk)
    return attend_where(queries, keys, values, is_visible)


def _gather(pool: Array, table: Array) -> Array:
    rows, width = table.shape
    pages = jnp.swapaxes(jnp.take(pool, table, axis=0, mode="clip"), 1, 2)
    return jnp.reshape(pages, (rows, pool.shape[1], width * pool.shape[2], pool.shape[3]))
