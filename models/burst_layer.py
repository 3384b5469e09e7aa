"""The KV cache during one decode burst: what was there before in one piece, what is new in a tail.

Gathering a row's pages costs about as much as attending over them, and a scatter into the pool may
copy it. So a burst gathers the pages once, writes its own tokens to a tail, whose column c holds
every row's token of step c, and copies the tail to the pages when it ends. For back ends without a
kernel that reads pages where they lie.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pat_jax.models.layers import MASKED
from pat_jax.models.paged_layer import NULL_PAGE, PagedLayer


class BurstLayer(NamedTuple):
    context_keys: Float[Array, "rows kv_heads length head_dim"]
    context_values: Float[Array, "rows kv_heads length head_dim"]
    tail_keys: Float[Array, "rows kv_heads steps head_dim"]
    tail_values: Float[Array, "rows kv_heads steps head_dim"]
    start: Int[Array, " rows"]  # tokens in the pages = position of the burst's first token

    @classmethod
    def begin(cls, layer: PagedLayer, start: Int[Array, " rows"], steps: int) -> "BurstLayer":
        """Before the first of at most `steps` steps; row r's first query will be at `start[r]`."""
        keys, values = layer.gather()
        tail = jnp.zeros((*keys.shape[:2], steps, keys.shape[3]), keys.dtype)
        return cls(keys, values, tail, tail, start)

    def attend(
        self,
        queries: Float[Array, "rows 1 kv_heads queries_per_kv head_dim"],
        keys: Float[Array, "rows 1 kv_heads head_dim"],
        values: Float[Array, "rows 1 kv_heads head_dim"],
        positions: Int[Array, "rows 1"],
    ) -> tuple[Float[Array, "rows 1 kv_heads queries_per_kv head_dim"], "BurstLayer"]:
        """As `LayerCache.attend`, for one token a row: one softmax over context and tail.

        Rows that have ended keep their position, and their output means nothing; the others have
        all gone the same number of steps since `begin`, and write at the same column.
        """
        column = jnp.max(positions[:, 0] - self.start)
        cache = self._replace(
            tail_keys=_put(self.tail_keys, keys, column),
            tail_values=_put(self.tail_values, values, column),
        )
        return cache._attend(queries[:, 0], column)[:, None], cache

    def _attend(self, queries: Array, column: Array) -> Array:
        scale = queries.shape[-1] ** -0.5

        def scores(keys: Array, is_visible: Array) -> Array:
            dots = jnp.einsum("bkgd,bksd->bkgs", queries, keys, preferred_element_type=jnp.float32)
            return jnp.where(is_visible[:, None, None, :], dots * scale, MASKED)

        length, steps = self.context_keys.shape[2], self.tail_keys.shape[2]
        in_context = jnp.arange(length)[None] < self.start[:, None]
        in_tail = jnp.arange(steps)[None] <= column
        context = scores(self.context_keys, in_context)
        tail = scores(self.tail_keys, in_tail)
        weights = jax.nn.softmax(jnp.concatenate([context, tail], axis=-1), axis=-1)
        of_context, of_tail = jnp.split(weights.astype(self.tail_values.dtype), [length], axis=-1)
        return jnp.einsum("bkgs,bksd->bkgd", of_context, self.context_values) + jnp.einsum(
            "bkgs,bksd->bkgd", of_tail, self.tail_values
        )

    def end(self, layer: PagedLayer, positions: Int[Array, " rows"]) -> PagedLayer:
        """Copies the tail to the pages: tokens `start[r]` … `positions[r] - 1` of each row r."""
        keys = _write_tail(layer.keys, self.tail_keys, layer.table, self.start, positions)
        values = _write_tail(layer.values, self.tail_values, layer.table, self.start, positions)
        return PagedLayer(keys, values, layer.table)


def _put(tail: Array, new: Array, column: Array) -> Array:
    new = jnp.swapaxes(new, 1, 2).astype(tail.dtype)
    return jax.lax.dynamic_update_slice(tail, new, (0, 0, column, 0))


def _write_tail(pool: Array, tail: Array, table: Array, start: Array, stop: Array) -> Array:
    """Page by page, each of them read and written back with the new tokens in their places."""
    page_size, (rows, _, steps, _) = pool.shape[2], tail.shape
    pages_per_row = (steps + page_size - 2) // page_size + 1  # a burst may begin anywhere in a page
    padded = jnp.pad(tail, ((0, 0), (0, 0), (page_size, page_size * pages_per_row), (0, 0)))

    def write_page(i: Int[Array, ""], pool: Array) -> Array:
        row, nth = i // pages_per_row, i % pages_per_row
        index = start[row] // page_size + nth
        position = index * page_size + jnp.arange(page_size)
        is_new = (position >= start[row]) & (position < stop[row])
        page = jnp.where(jnp.any(is_new), table[row, index], NULL_PAGE)
        at = (row, 0, (nth + 1) * page_size - start[row] % page_size, 0)
        new = jax.lax.dynamic_slice(padded, at, (1, *pool.shape[1:]))
        old = jax.lax.dynamic_index_in_dim(pool, page)
        kept = jnp.where(is_new[None, None, :, None], new, old)
        return jax.lax.dynamic_update_slice(pool, kept, (page, 0, 0, 0))

    return jax.lax.fori_loop(0, rows * pages_per_row, write_page, pool)
