"""The KV cache of steps that verify drafts, with a different number of tokens in each row.

A *line* is one flat batch of tokens: every running row's newest token and, behind it, some of its
draft tokens. Layers that compute token by token take the line as it is. Attention groups the tokens
by row, so that a row's keys and values are read once for all of its tokens.

A row may have two drafts that begin with different tokens: a trunk and, behind it, a *branch*. Each
sees the row's newest token and its own tokens. A branch token's slot (its index in the row's cache)
is not its position in the sequence.

Rows advance by different numbers of tokens. Rejected draft tokens stay in the cache behind the
row's newest token, where nothing sees them, until the next step overwrites them. An accepted branch
moves to the slots of the trunk.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pat_jax.models.cache.burst_layer import attend_to_copies
from pat_jax.models.cache.paged_layer import NULL_PAGE, PagedLayer
from pat_jax.models.kernels.kernel_choice import Kernels
from pat_jax.models.layers import sees
from pat_jax.models.projected import Projected


class Line(NamedTuple):
    """One step's tokens of all rows, concatenated. In the shapes, `tokens` is the number of entries
    of the line, and `turns` the largest number of tokens of a row."""

    row: Int[Array, " tokens"]
    is_taken: Bool[Array, " tokens"]  # whether this entry of the line holds a token
    turn: Int[Array, " tokens"]  # each token's index among the tokens of its row, from 0
    place: Int[Array, "rows turns"]  # each token's index in the line; any, where a row has fewer
    start: Int[Array, " rows"]  # position of each row's first token
    # Number of draft tokens in the trunk; later ones are the branch. None: no row has a branch.
    trunk: Int[Array, " rows"] | None = None

    def by_row(self, x: Float[Array, "1 tokens *rest"]) -> Float[Array, "rows turns *rest"]:
        return x[0, self.place]

    def in_line(self, x: Float[Array, "rows turns *rest"]) -> Float[Array, "1 tokens *rest"]:
        return x[self.row, self.turn][None]

    @property
    def turns(self) -> Int[Array, " turns"]:
        """All values of `turn`, 0 … most tokens of a row - 1. What is written for tokens that a row
        lacks is never read."""
        return jnp.arange(self.place.shape[1])

    @property
    def depth(self) -> Int[Array, " tokens"]:
        """Each token's position minus the position of its row's first token."""
        if self.trunk is None:
            return self.turn
        return jnp.where(self.is_branch, self.turn - self.trunk[self.row], self.turn)

    @property
    def is_branch(self) -> Bool[Array, " tokens"]:
        if self.trunk is None:
            return jnp.zeros_like(self.is_taken)
        return self.turn > self.trunk[self.row]

    @property
    def slots(self) -> Int[Array, " tokens"]:
        """The slot of each token: its index in the cache of its row."""
        return self.start[self.row] + self.turn

    def moved(self, taken: Bool[Array, " rows"]) -> Int[Array, "rows draft"]:
        """Returns an order of each row's draft tokens: if `taken`, the branch comes first."""
        assert self.trunk is not None, "a line with branches"
        draft = self.place.shape[1] - 1
        return (jnp.arange(draft)[None] + jnp.where(taken, self.trunk, 0)[:, None]) % draft


class DraftPages(NamedTuple):
    """The paged cache of one layer, for kernels that read pages in place.

    A row's new tokens may lie in several pages. The table has entries up to a row's last new token;
    entries behind the row's pages are NULL_PAGE.
    """

    keys: Float[Array, "pages kv_heads page_size head_dim"]
    values: Float[Array, "pages kv_heads page_size head_dim"]
    table: Int[Array, "rows width"]
    line: Line

    def attend(
        self, new: Projected, positions: Int[Array, "1 tokens"], kernels: Kernels
    ) -> tuple[Float[Array, "1 tokens kv_heads queries_per_kv head_dim"], "DraftPages"]:
        """Implements `LayerCache.attend` for all rows in one line."""
        del positions  # `line` has them
        # Entries without a token write to NULL_PAGE.
        of_token = jnp.where(self.line.is_taken[:, None], self.table[self.line.row], NULL_PAGE)
        each = PagedLayer(self.keys, self.values, of_token)
        queries, written = each.append(new.by_token(), self.line.slots, kernels)
        cache = PagedLayer(written.keys, written.values, self.table)
        queries = self.line.by_row(jnp.swapaxes(queries, 0, 1))
        start = self.line.start
        attended = cache.read(queries, start, kernels, kernels.verify, trunk=self.line.trunk)
        pages = DraftPages(cache.keys, cache.values, self.table, self.line)
        return self.line.in_line(attended), pages

    def on_branch(self, taken: Bool[Array, " rows"]) -> "DraftPages":
        """Returns the cache with each accepted branch (`taken`) in the slots of its row's trunk."""
        order = self.line.moved(taken)
        own = jnp.repeat(jnp.where(taken[:, None], self.table, NULL_PAGE), order.shape[1], axis=0)
        each = PagedLayer(self.keys, self.values, own)
        first = self.line.start[:, None] + 1
        # Read before any write: XLA:GPU would fuse both, and copy the whole pool for it.
        token = jax.lax.optimization_barrier(each.token(jnp.ravel(first + order)))
        written = each.write(token[0], token[1], jnp.ravel(first + self.line.turns[None, :-1]))
        return DraftPages(written.keys, written.values, self.table, self.line)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("keys", "values"), meta_fields=())
@dataclass(frozen=True)
class DraftCopy:
    """A contiguous copy of the rows' pages, as in `BurstLayer`, but each token's column is its
    slot."""

    keys: Float[Array, "rows*kv_heads head_dim columns"]
    values: Float[Array, "rows*kv_heads columns head_dim"]

    @classmethod
    def begin(cls, layer: PagedLayer, turns: int) -> "DraftCopy":
        """Copies the pages of all rows.

        Args:
          turns: largest number of tokens of a row in a step. A row may write so many tokens past
            the last page in its table.
        """
        keys, values = (jnp.reshape(x, (-1, *x.shape[2:])) for x in layer.gather())
        behind = ((0, 0), (0, turns), (0, 0))
        return cls(jnp.swapaxes(jnp.pad(keys, behind), 1, 2), jnp.pad(values, behind))

    def end(
        self,
        layer: PagedLayer,
        start: Int[Array, " rows"],
        stop: Int[Array, " rows"],
        most: int,
    ) -> PagedLayer:
        """Returns `layer` with the new tokens `start[r]` … `stop[r] - 1` of each row r, at most
        `most` of a row."""
        keys = _write_pages(layer.keys, self.keys, layer.table, start, stop, most=most, turned=True)
        values = _write_pages(
            layer.values, self.values, layer.table, start, stop, most=most, turned=False
        )
        return PagedLayer(keys, values, layer.table)


class DraftRows(NamedTuple):
    """A `DraftCopy` with the tokens (`Line`) of one step."""

    copy: DraftCopy
    line: Line

    def attend(
        self, new: Projected, positions: Int[Array, "1 tokens"], kernels: Kernels
    ) -> tuple[Float[Array, "1 tokens kv_heads queries_per_kv head_dim"], "DraftRows"]:
        """Implements `LayerCache.attend` for all rows in one line."""
        del positions, kernels  # the line has the positions; no kernel reads contiguous rows
        line = self.line
        queries, keys, values = new.finished()
        keys, values = line.by_row(keys), line.by_row(values)
        copy = DraftCopy(
            _put(self.copy.keys, jnp.transpose(keys, (0, 2, 3, 1)), line.start, axis=2),
            _put(self.copy.values, jnp.swapaxes(values, 1, 2), line.start, axis=1),
        )
        attended = _attend(copy, line.by_row(queries), line)
        return line.in_line(attended), DraftRows(copy, line)

    def on_branch(self, taken: Bool[Array, " rows"]) -> "DraftRows":
        """Returns the cache with each accepted branch (`taken`) in the slots of its row's trunk."""
        order = self.line.moved(taken)
        begin = self.line.start + 1

        def moved(rows: Array, axis: int) -> Array:
            heads = rows.shape[0] // len(taken)
            sizes = [heads, *rows.shape[1:]]
            sizes[axis] = order.shape[1]

            def move(row: Int[Array, ""], rows: Array) -> Array:
                at: list[Any] = [row * heads, 0, 0]
                at[axis] = begin[row]
                chunk = jnp.take(jax.lax.dynamic_slice(rows, at, sizes), order[row], axis=axis)
                return jax.lax.dynamic_update_slice(rows, chunk, at)

            return jax.lax.fori_loop(0, len(taken), move, rows)

        copy = DraftCopy(moved(self.copy.keys, 2), moved(self.copy.values, 1))
        return DraftRows(copy, self.line)


def _attend(
    copy: DraftCopy,
    queries: Float[Array, "rows turns kv_heads queries_per_kv head_dim"],
    line: Line,
) -> Float[Array, "rows turns kv_heads queries_per_kv head_dim"]:
    rows, turns, heads, group, dim = queries.shape
    flat = jnp.reshape(jnp.swapaxes(queries, 1, 2), (rows * heads, turns * group, dim))
    turn = jnp.repeat(line.turns, group)
    column = jnp.arange(copy.keys.shape[2])
    trunk = None if line.trunk is None else line.trunk[:, None, None]
    is_visible = sees(turn[None, :, None], column[None, None], line.start[:, None, None], trunk)
    out = attend_to_copies(flat, copy.keys, copy.values, is_visible)
    out = jnp.reshape(out, (rows, heads, turns, group, dim))
    return jnp.swapaxes(out, 1, 2).astype(queries.dtype)


def _put(rows: Array, new: Float[Array, "rows kv_heads *chunk"], at: Array, axis: int) -> Array:
    """Writes each row's chunk at index `at` along `axis`, row by row (as in `paged_layer`)."""
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
    """Returns the pool with the new tokens in their pages."""
    _, heads, size, dim = pool.shape
    pages_per_row = (most + size - 2) // size + 1  # a burst may begin anywhere in a page

    def write_page(i: Int[Array, ""], pool: Array) -> Array:
        row = i // pages_per_row
        index = start[i // pages_per_row] // size + i % pages_per_row
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
