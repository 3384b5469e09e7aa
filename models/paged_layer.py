"""The KV cache in pages: one layer's pool, and the table that says which pages a row has.

A page holds `page_size` consecutive tokens of one sequence. Entry w of a row's table is the page of
its tokens w * page_size … (w + 1) * page_size - 1. Page NULL_PAGE belongs to nobody: entries beyond
a row's tokens name it, and empty rows read and write it.

This is the plain way to attend over pages, for any back end: it gathers each row's pages, then
attends over them as over dense rows. Kernels that read pages where they lie are tested against it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pat_jax.models.layers import attend

NULL_PAGE = 0


class PagedLayer(NamedTuple):
    keys: Float[Array, "pages kv_heads page_size head_dim"]
    values: Float[Array, "pages kv_heads page_size head_dim"]
    table: Int[Array, "rows width"]

    @property
    def page_size(self) -> int:
        return self.keys.shape[2]

    def attend(
        self,
        queries: Float[Array, "rows length kv_heads queries_per_kv head_dim"],
        keys: Float[Array, "rows length kv_heads head_dim"],
        values: Float[Array, "rows length kv_heads head_dim"],
        positions: Int[Array, "rows length"],
    ) -> tuple[Float[Array, "rows length kv_heads queries_per_kv head_dim"], "PagedLayer"]:
        """As `LayerCache.attend`. All rows write before any attends, so that a row may read what
        another one writes in the same call: blocks of one sequence can be rows side by side.

        The tokens of a row lie within one page; the caller sees to it.
        """
        cache = self.write(keys, values, positions[:, 0])
        return attend(queries, *cache.gather(), positions), cache

    def gather(self) -> tuple[Float[Array, "rows kv_heads length head_dim"], Array]:
        """Every row's keys and values in one piece; the length is width * page_size."""
        return _gather(self.keys, self.table), _gather(self.values, self.table)

    def write(
        self,
        keys: Float[Array, "rows chunk kv_heads head_dim"],
        values: Float[Array, "rows chunk kv_heads head_dim"],
        start: Int[Array, " rows"],
    ) -> "PagedLayer":
        """Puts tokens start … start + chunk - 1 of each row into the page that holds them."""
        index = (start // self.page_size)[:, None]
        pages = jnp.take_along_axis(self.table, index, axis=1, mode="clip")[:, 0]
        offsets = start % self.page_size
        chunks = [jnp.swapaxes(x, 1, 2).astype(self.keys.dtype) for x in (keys, values)]

        # One row after the other: a scatter would copy the whole pool on some back ends.
        def write_row(row: Int[Array, ""], pools: list[Array]) -> list[Array]:
            at = (pages[row], 0, offsets[row], 0)
            new = [jax.lax.dynamic_index_in_dim(chunk, row) for chunk in chunks]
            return [
                jax.lax.dynamic_update_slice(pool, x, at)
                for pool, x in zip(pools, new, strict=True)
            ]

        pools = jax.lax.fori_loop(0, len(pages), write_row, [self.keys, self.values])
        return PagedLayer(*pools, self.table)


def _gather(pool: Array, table: Array) -> Array:
    rows, width = table.shape
    pages = jnp.swapaxes(jnp.take(pool, table, axis=0, mode="clip"), 1, 2)
    return jnp.reshape(pages, (rows, pool.shape[1], width * pool.shape[2], pool.shape[3]))
