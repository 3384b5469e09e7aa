"""The KV cache of steps that verify drafts: several new tokens a row, from wherever the row stands.

Rows go on by different numbers of tokens. What a step writes of tokens that are not accepted lies behind
the row's newest one, where nothing sees it, until the next step writes over it.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pat_jax.models.layers import MASKED
from pat_jax.models.paged_layer import NULL_PAGE, PagedLayer


class DraftPages(NamedTuple):
    """Pages, where kernels read them; the tokens of a row may lie in several.

    A row's table reaches as far as its last query, behind its pages with NULL_PAGE.
    """

    keys: Float[Array, "pages kv_heads page_size head_dim"]
    values: Float[Array, "pages kv_heads page_size head_dim"]
    table: Int[Array, "rows width"]

    def attend(
        self,
        queries: Float[Array, "rows length kv_heads queries_per_kv head_dim"],
        keys: Float[Array, "rows length kv_heads head_dim"],
        values: Float[Array, "rows length kv_heads head_dim"],
        positions: Int[Array, "rows length"],
    ) -> tuple[Float[Array, "rows length kv_heads queries_per_kv head_dim"], "DraftPages"]:
        """As `LayerCache.attend`."""
        each = PagedLayer(
            self.keys, self.values, jnp.repeat(self.table, positions.shape[1], axis=0)
        )

        def apart(x: Array) -> Array:
            return jnp.reshape(x, (-1, 1, *x.shape[2:]))

        written = each.write(apart(keys), apart(values), jnp.ravel(positions))
        cache = PagedLayer(written.keys, written.values, self.table)
        return cache.read(queries, positions[:, 0]), DraftPages(*cache)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("keys", "values"), meta_fields=())
@dataclass(frozen=True)
class DraftRows:
    """A copy of the rows' pages in one piece, as `BurstLayer` is, but with each token at its position."""

    keys: Float[Array, "rows*kv_heads head_dim columns"]
    values: Float[Array, "rows*kv_heads columns head_dim"]

    @classmethod
    def begin(cls, layer: PagedLayer, draft: int) -> "DraftRows":
        """
        Args:
          draft: most tokens of a draft: so far a row's last step may write past its table.
        """
        keys, values = (jnp.reshape(x, (-1, *x.shape[2:])) for x in layer.gather())
        behind = ((0, 0), (0, 1 + draft), (0, 0))
        return cls(jnp.swapaxes(jnp.pad(keys, behind), 1, 2), jnp.pad(values, behind))

    def attend(
        self,
        queries: Float[Array, "rows length kv_heads queries_per_kv head_dim"],
        keys: Float[Array, "rows length kv_heads head_dim"],
        values: Float[Array, "rows length kv_heads head_dim"],
        positions: Int[Array, "rows length"],
    ) -> tuple[Float[Array, "rows length kv_heads queries_per_kv head_dim"], "DraftRows"]:
        """As `LayerCache.attend`."""
        cache = DraftRows(
            _put(self.keys, jnp.transpose(keys, (0, 2, 3, 1)), positions[:, 0], axis=2),
            _put(self.values, jnp.swapaxes(values, 1, 2), positions[:, 0], axis=1),
        )
        return cache._attend(queries, positions), cache

    def _attend(self, queries: Array, positions: Array) -> Array:
        rows, length, heads, group, dim = queries.shape
        flat = jnp.reshape(jnp.swapaxes(queries, 1, 2), (rows * heads, length * group, dim))
        scores = jnp.einsum("nqd,nds->nqs", flat, self.keys, preferred_element_type=jnp.float32)
        scores = scores * dim**-0.5
        column = jnp.arange(self.keys.shape[2])[None, None]
        is_visible = column <= jnp.repeat(positions, group, axis=1)[:, :, None]
        scores = jnp.where(jnp.repeat(is_visible, heads, axis=0), scores, MASKED)
        weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
        total = jnp.sum(weights, axis=-1, keepdims=True)
        out = jnp.einsum(
            "nqs,nsd->nqd",
            weights.astype(self.values.dtype),
            self.values,
            preferred_element_type=jnp.float32,
        )
        out = jnp.reshape(out / total, (rows, heads, length, group, dim))
        return jnp.swapaxes(out, 1, 2).astype(queries.dtype)

    def end(
        self,
        layer: PagedLayer,
        start: Int[Array, " rows"],
        stop: Int[Array, " rows"],
        most: int,
    ) -> PagedLayer:
        """Copies the new tokens to the pages: `start[r]` … `stop[r] - 1` of each row r, at `most` so many."""
        keys = _write_pages(layer.keys, self.keys, layer.table, start, stop, most=most, turned=True)
        values = _write_pages(
            layer.values, self.values, layer.table, start, stop, most=most, turned=False
        )
        return PagedLayer(keys, values, layer.table)


def _put(rows: Array, new: Float[Array, "rows kv_heads *chunk"], at: Array, axis: int) -> Array:
    """Each row's chunk at its own place along `axis`; one row after the other (`paged_layer`)."""
    new = new.astype(rows.dtype)

    def put(row: Int[Array, ""], rows: Array) -> Array:
        place = [row * new.shape[1], 0, 0]
        place[axis] = at[row]
        return jax.lax.dynamic_update_slice(rows, new[row], place)

    return jax.lax.fori_loop(0, len(at), put, rows)


@functools.partial(jax.jit, static_argnames=("most", "turned"))  # once for all layers
def _write_pages(
    pool: Array, rows: Array, table: Array, start: Array, stop: Array, *, most: int, turned: bool
) -> Array:
    """Page by page, each of them read and written back with the new tokens in their places."""
    _, heads, size, dim = pool.shape
    pages_per_row = (most + size - 2) // size + 1  # a burst may begin anywhere in a page

    def write_page(i: Int[Array, ""], pool: Array) -> Array:
        row, index = i // pages_per_row, start[i // pages_per_row] // size + i % pages_per_row
        position = index * size + jnp.arange(size)
        is_new = (position >= start[row]) & (position < stop[row])
        page = jnp.where(jnp.any(is_new), table[row, index], NULL_PAGE)
        if turned:
            new = jax.lax.dynamic_slice(rows, (row * heads, 0, index * size), (heads, dim, size))
            new = jnp.swapaxes(new, 1, 2)
        else:
            new = jax.lax.dynamic_slice(rows, (row * heads, index * size, 0), (heads, size, dim))
        old = jax.lax.dynamic_index_in_dim(pool, page)
        kept = jnp.where(is_new[None, None, :, None], new[None], old)
        return jax.lax.dynamic_update_slice(pool, kept, (page, 0, 0, 0))

    return jax.lax.fori_loop(0, len(start) * pages_per_row, write_page, pool)
