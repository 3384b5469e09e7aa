"""The KV cache during one decode burst: each row's pages as one contiguous copy.

Gathering a row's pages costs as much as attending over them, so a burst gathers them once. New
tokens fill the copy from its end: decode step c writes the tokens of all rows to column -1 - c in
one update. A row has at least as many free columns as it gets new tokens, so none is overwritten.
Softmax does not depend on the order of the keys. When the burst ends, its tokens are copied to the
pages. This form is used where no kernel reads pages in place.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pat_jax.models.cache.paged_layer import NULL_PAGE, PagedLayer
from pat_jax.models.kernels.kernel_choice import Kernels
from pat_jax.models.layers import MASKED
from pat_jax.models.projected import Projected


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("keys", "values", "start"),
    meta_fields=("steps",),
)
@dataclass(frozen=True)
class BurstLayer:
    # One dimension for rows and KV heads: with two, and one head, XLA:CPU copies all of it each step.
    # Keys are transposed: XLA:CPU then multiplies them with queries in as little as half the time.
    keys: Float[Array, "rows*kv_heads head_dim length"]
    values: Float[Array, "rows*kv_heads length head_dim"]
    start: Int[Array, " rows"]  # number of a row's tokens in its pages: the first new position
    steps: int  # number of last columns that new tokens may take

    @classmethod
    def begin(cls, layer: PagedLayer, start: Int[Array, " rows"], steps: int) -> "BurstLayer":
        """Returns a copy of the rows' pages, for a burst of at most `steps` decode steps.

        Row r's first query will be at position `start[r]`. The layer's table must have pages for
        all tokens that a row has at the end of the burst.
        """
        keys, values = (jnp.reshape(x, (-1, *x.shape[2:])) for x in layer.gather())
        return cls(jnp.swapaxes(keys, 1, 2), values, start, min(steps, values.shape[1]))

    def attend(
        self, new: Projected, positions: Int[Array, "rows 1"], kernels: Kernels
    ) -> tuple[Float[Array, "rows 1 kv_heads queries_per_kv head_dim"], "BurstLayer"]:
        """Implements `LayerCache.attend` for one token per row.

        Finished rows keep their position; their output must not be used. All other rows have taken
        the same number of steps since `begin`, so they write to the same column.
        """
        del kernels  # no kernel reads contiguous rows
        queries, keys, values = new.finished()
        step = jnp.max(positions[:, 0] - self.start)
        column = self.values.shape[1] - 1 - step
        cache = BurstLayer(
            _put(self.keys, keys, column, axis=2),
            _put(self.values, values, column, axis=1),
            self.start,
            self.steps,
        )
        columns = jnp.arange(cache.keys.shape[2])[None]
        is_visible = (columns < self.start[:, None]) | (columns >= column)
        flat = jnp.reshape(queries, (cache.keys.shape[0], *queries.shape[3:]))
        out = attend_to_copies(flat, cache.keys, cache.values, is_visible[:, None])
        return jnp.reshape(out, queries.shape).astype(queries.dtype), cache

    def end(self, layer: PagedLayer, positions: Int[Array, " rows"]) -> PagedLayer:
        """Returns `layer` with the new tokens `start[r]` … `positions[r] - 1` of each row r."""

        def write(pool: Array, newest_first: Array) -> Array:
            tail = jnp.flip(newest_first, axis=1)
            tail = jnp.reshape(tail, (len(self.start), pool.shape[1], self.steps, pool.shape[3]))
            return _write_tail(pool, tail, layer.table, self.start, positions)

        keys = jnp.swapaxes(self.keys[:, :, -self.steps :], 1, 2)
        values = self.values[:, -self.steps :]
        return PagedLayer(write(layer.keys, keys), write(layer.values, values), layer.table)


def attend_to_copies(
    queries: Float[Array, "rows*kv_heads queries head_dim"],
    keys: Float[Array, "rows*kv_heads head_dim length"],
    values: Float[Array, "rows*kv_heads length head_dim"],
    is_visible: Bool[Array, "rows _ length"],
) -> Float[Array, "rows*kv_heads queries head_dim"]:
    """Returns attention to contiguous copies of rows, whose keys are transposed, in float32."""
    scores = jnp.einsum("nqd,nds->nqs", queries, keys, preferred_element_type=jnp.float32)
    scores = scores * queries.shape[-1] ** -0.5
    is_visible = jnp.repeat(is_visible, len(queries) // len(is_visible), axis=0)
    scores = jnp.where(is_visible, scores, MASKED)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    # Divide the outputs by the sum, not the weights: there are fewer outputs.
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights.astype(values.dtype)
    out = jnp.einsum("nqs,nsd->nqd", weights, values, preferred_element_type=jnp.float32)
    return out / total


def _put(rows: Array, new: Array, column: Array, axis: int) -> Array:
    new = jnp.expand_dims(jnp.reshape(new, (rows.shape[0], -1)), axis).astype(rows.dtype)
    return jax.lax.dynamic_update_slice_in_dim(rows, new, column, axis)


@jax.jit  # traced and lowered once for keys, values and all layers
def _write_tail(pool: Array, tail: Array, table: Array, start: Array, stop: Array) -> Array:
    """Returns the pool with the new tokens in their pages."""
    page_size = pool.shape[2]
    rows, _, steps, _ = tail.shape
    pages_per_row = (steps + page_size - 2) // page_size + 1  # a burst may begin anywhere in a page
    padded = jnp.pad(tail, ((0, 0), (0, 0), (page_size, page_size * pages_per_row), (0, 0)))

    def write_page(i: Int[Array, ""], pool: Array) -> Array:
        row = i // pages_per_row
        nth = i % pages_per_row
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
