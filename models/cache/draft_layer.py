"""The KV cache of steps that verify drafts: as many new tokens of each row as are worth it, in one
line.

A line of tokens holds every running row's newest one and, behind it, some of its draft. What is
computed token by token takes the line as it is; attention looks at each row's tokens together, so
that its keys and values are read once for all of them.

A row's tokens may be two drafts that begin with different tokens, a trunk and a *branch* behind it:
each sees the newest token and its own. A token's place in the cache is then not its position.

Rows go on by different numbers of tokens. What a step writes of tokens that are not accepted lies
behind the row's newest one, where nothing sees it, until the next step writes over it. A branch
that is accepted moves to where the trunk was.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pat_jax.models.cache.paged_layer import NULL_PAGE, PagedLayer
from pat_jax.models.kernels.kernel_choice import Kernels
from pat_jax.models.layers import MASKED, sees


class Line(NamedTuple):
    """Which rows the tokens of a line are of."""

    row: Int[Array, " tokens"]
    is_taken: Bool[Array, " tokens"]  # there are no more tokens than places
    turn: Int[Array, " tokens"]  # among those of its row, from 0
    place: Int[Array, "rows turns"]  # in the line; of turns that a row does not have any place
    start: Int[Array, " rows"]  # position of each row's first token
    # A row's turns behind so many behind the first are of its branch; None: no row has any.
    trunk: Int[Array, " rows"] | None = None

    def by_row(self, x: Float[Array, "1 tokens *rest"]) -> Float[Array, "rows turns *rest"]:
        return x[0, self.place]

    def in_line(self, x: Float[Array, "rows turns *rest"]) -> Float[Array, "1 tokens *rest"]:
        return x[self.row, self.turn][None]

    @property
    def turns(self) -> Int[Array, " turns"]:
        """Those too that a row does not have: what they write, nothing sees."""
        return jnp.arange(self.place.shape[1])

    @property
    def depth(self) -> Int[Array, " tokens"]:
        """Positions behind that of the row's first token."""
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
        """Where in its row's cache each token is."""
        return self.start[self.row] + self.turn

    def moved(self, taken: Bool[Array, " rows"]) -> Int[Array, "rows draft"]:
        """Which token behind a row's first goes where, so that a branch that is taken is in
        front."""
        assert self.trunk is not None, "a line with branches"
        draft = self.place.shape[1] - 1
        return (jnp.arange(draft)[None] + jnp.where(taken, self.trunk, 0)[:, None]) % draft


class DraftPages(NamedTuple):
    """Pages, where kernels read them; the tokens of a row may lie in several.

    A row's table reaches as far as its last turn, behind its pages with NULL_PAGE.
    """

    keys: Float[Array, "pages kv_heads page_size head_dim"]
    values: Float[Array, "pages kv_heads page_size head_dim"]
    table: Int[Array, "rows width"]
    line: Line

    def attend(
        self,
        queries: Float[Array, "1 tokens kv_heads queries_per_kv head_dim"],
        keys: Float[Array, "1 tokens kv_heads head_dim"],
        values: Float[Array, "1 tokens kv_heads head_dim"],
        positions: Int[Array, "1 tokens"],
        kernels: Kernels,
    ) -> tuple[Float[Array, "1 tokens kv_heads queries_per_kv head_dim"], "DraftPages"]:
        """As `LayerCache.attend`, of all rows in one line."""
        del positions  # the line knows where tokens are
        # What stands in a place that is not taken is not a row's.
        of_token = jnp.where(self.line.is_taken[:, None], self.table[self.line.row], NULL_PAGE)
        each = PagedLayer(self.keys, self.values, of_token)
        keys, values = jnp.swapaxes(keys, 0, 1), jnp.swapaxes(values, 0, 1)
        written = each.write(keys, values, self.line.slots)
        cache = PagedLayer(written.keys, written.values, self.table)
        queries, start = self.line.by_row(queries), self.line.start
        attended = cache.read(queries, start, kernels, kernels.verify, trunk=self.line.trunk)
        return self.line.in_line(attended), DraftPages(*cache, self.line)

    def on_branch(self, taken: Bool[Array, " rows"]) -> "DraftPages":
        """With the branches that rows took where they are looked for."""
        order = self.line.moved(taken)
        own = jnp.repeat(jnp.where(taken[:, None], self.table, NULL_PAGE), order.shape[1], axis=0)
        each, first = PagedLayer(self.keys, self.values, own), self.line.start[:, None] + 1
        # Read before anything is written: XLA:GPU would do both in one kernel, and copy the whole pool for it.
        token = jax.lax.optimization_barrier(each.token(jnp.ravel(first + order)))
        written = each.write(token[0], token[1], jnp.ravel(first + self.line.turns[None, :-1]))
        return DraftPages(written.keys, written.values, self.table, self.line)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("keys", "values"), meta_fields=())
@dataclass(frozen=True)
class DraftCopy:
    """A copy of the rows' pages in one piece, as `BurstLayer` has it, but each token at its
    position."""

    keys: Float[Array, "rows*kv_heads head_dim columns"]
    values: Float[Array, "rows*kv_heads columns head_dim"]

    @classmethod
    def begin(cls, layer: PagedLayer, turns: int) -> "DraftCopy":
        """
        Args:
          turns: most tokens of a row in a step: so far its last one may write past its table.
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
        """Copies the new tokens to the pages: `start[r]` … `stop[r] - 1` of each row r, at `most`
        so many."""
        keys = _write_pages(layer.keys, self.keys, layer.table, start, stop, most=most, turned=True)
        values = _write_pages(
            layer.values, self.values, layer.table, start, stop, most=most, turned=False
        )
        return PagedLayer(keys, values, layer.table)


class DraftRows(NamedTuple):
    """A copy, for one step."""

    copy: DraftCopy
    line: Line

    def attend(
        self,
        queries: Float[Array, "1 tokens kv_heads queries_per_kv head_dim"],
        keys: Float[Array, "1 tokens kv_heads head_dim"],
        values: Float[Array, "1 tokens kv_heads head_dim"],
        positions: Int[Array, "1 tokens"],
        kernels: Kernels,
    ) -> tuple[Float[Array, "1 tokens kv_heads queries_per_kv head_dim"], "DraftRows"]:
        """As `LayerCache.attend`, of all rows in one line."""
        del positions, kernels  # the line knows where tokens are; rows in one piece have no kernels
        line = self.line
        keys, values = line.by_row(keys), line.by_row(values)
        copy = DraftCopy(
            _put(self.copy.keys, jnp.transpose(keys, (0, 2, 3, 1)), line.start, axis=2),
            _put(self.copy.values, jnp.swapaxes(values, 1, 2), line.start, axis=1),
        )
        attended = _attend(copy, line.by_row(queries), line)
        return line.in_line(attended), DraftRows(copy, line)

    def on_branch(self, taken: Bool[Array, " rows"]) -> "DraftRows":
        """With the branches that rows took where they are looked for."""
        order, begin = self.line.moved(taken), self.line.start + 1

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
    scores = jnp.einsum("nqd,nds->nqs", flat, copy.keys, preferred_element_type=jnp.float32)
    scores = scores * dim**-0.5
    turn, column = jnp.repeat(line.turns, group), jnp.arange(copy.keys.shape[2])
    trunk = None if line.trunk is None else line.trunk[:, None, None]
    is_visible = sees(turn[None, :, None], column[None, None], line.start[:, None, None], trunk)
    scores = jnp.where(jnp.repeat(is_visible, heads, axis=0), scores, MASKED)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum(
        "nqs,nsd->nqd",
        weights.astype(copy.values.dtype),
        copy.values,
        preferred_element_type=jnp.float32,
    )
    out = jnp.reshape(out / total, (rows, heads, turns, group, dim))
    return jnp.swapaxes(out, 1, 2).astype(queries.dtype)


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
