"""Attention to pages on a TPU, for single queries and for blocks of them.

This is flash attention (arXiv 2307.08691) with a block table. One program runs for each row, one
after the other. It multiplies the keys of some pages at a time while the next pages are copied,
near its end those of the next row. A copy takes half a microsecond on a TPU v4, in which its memory
could deliver half a megabyte.

No kernel of JAX fits. `paged_attention` copies the pages of one KV head at a time, 4 KiB each.
`ragged_paged_attention` needs a pool [pages, page_size, 2 * kv_heads, head_dim] with alternating
keys and values, to which our pool cannot be reshaped without a copy.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu
from jaxtyping import Array, Float, Int

from pat_jax.models.kernels.paged_prefill import LEAST_SIDE, by_head, by_token, whole_turns
from pat_jax.models.layers import MASKED, sees

LANES = 128  # values in a row of a register
TURN_BYTES = 2**19  # of the keys that a program multiplies at once; its values have as many
MOST_KEYS = 1024  # that it multiplies at once
BUFFERS = 3  # turns whose pages are in a core's vector memory, or are being copied there


def fits_tpu(page_size: int, head_dim: int) -> bool:
    """Whether the kernel can be lowered: pages must be whole registers."""
    return page_size % LEAST_SIDE == head_dim % LANES == 0


@jax.jit
def attend_blocks_on_tpu(
    queries: Float[Array, "rows length kv_heads queries_per_kv head_dim"],
    keys: Float[Array, "pages kv_heads page_size head_dim"],
    values: Float[Array, "pages kv_heads page_size head_dim"],
    table: Int[Array, "rows width"],
    start: Int[Array, " rows"],
    trunk: Int[Array, " rows"] | None = None,
) -> Float[Array, "rows length kv_heads queries_per_kv head_dim"]:
    """Implements `attend_blocks_on_gpu` on a TPU; `fits_tpu` tells for which shapes."""
    rows, length, heads, group, dim = queries.shape
    page_size = keys.shape[2]
    flat = by_head(queries, LEAST_SIDE)
    fitting = TURN_BYTES // (heads * dim * keys.dtype.itemsize)
    at_once = max(min(fitting, MOST_KEYS) // page_size, 1)
    # A program reads two rows of the table: the last program's second row has no page.
    table = jnp.pad(whole_turns(table, at_once), ((0, 1), (0, 0)))[:, None]
    of_two = pl.BlockSpec(
        (pl.Element(2), pl.Element(1), pl.Element(table.shape[2])),
        lambda row, *_: (row, 0, 0),
        memory_space=tpu.SMEM,
    )
    of_row = pl.BlockSpec((None, *flat.shape[1:]), lambda row, *_: (row, 0, 0, 0))
    in_memory = pl.BlockSpec(memory_space=pl.ANY)
    out = pl.pallas_call(
        functools.partial(_attend, length=length, branches=trunk is not None),
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(rows,),
            in_specs=[of_two, of_row, in_memory, in_memory],
            out_specs=of_row,
            scratch_shapes=_scratch(keys, at_once, flat.shape[1:]),
        ),
        out_shape=jax.ShapeDtypeStruct(flat.shape, queries.dtype),
        compiler_params=tpu.CompilerParams(disable_bounds_checks=True),
        name="attend_blocks",
    )(start, start if trunk is None else trunk, table, flat, keys, values)
    return by_token(out, length, group)


def _scratch(keys: Array, at_once: int, queries_shape: tuple[int, ...]) -> list[Any]:
    """Returns what stays in memory from one program to the next, in the order of `_attend`."""
    of_query = tpu.VMEM((*queries_shape[:2], LANES), jnp.float32)
    return [
        tpu.VMEM((BUFFERS, at_once, 2, *keys.shape[1:]), keys.dtype),
        tpu.SemaphoreType.DMA((BUFFERS,)),
        tpu.SMEM((2,), jnp.int32),  # turns of this row that were begun, and the first one's slot
        tpu.VMEM(queries_shape, jnp.float32),
        of_query,
        of_query,
    ]


def _attend(
    start_ref, trunk_ref, table_ref, queries_ref, keys_ref, values_ref, out_ref,
    fetched, semaphores, ahead, sums, largest, totals,
    *, length: int, branches: bool,
):  # fmt: skip
    row = pl.program_id(0)
    at_once, _, heads, page_size, dim = fetched.shape[1:]
    start, trunk = start_ref[row], trunk_ref[row] if branches else None
    square = sums.shape[1], at_once * page_size
    query = jax.lax.broadcasted_iota(jnp.int32, square, 0) % length
    column = jax.lax.broadcasted_iota(jnp.int32, square, 1)
    pl.when(row == 0)(lambda: _clear(ahead, fetched))
    pages, next_pages = _pages(start_ref, length, page_size)
    pools = keys_ref, values_ref
    copies = _Copies(table_ref, pools, fetched, semaphores, pages, next_pages, ahead[1])

    def over_pages(turn, begun):
        upto = jnp.minimum(turn + BUFFERS, copies.most_turns)
        jax.lax.fori_loop(begun, upto, copies.begin, None)
        slot = copies.wait(turn)
        is_visible = sees(query, turn * at_once * page_size + column, start, trunk)
        for head in range(heads):
            keys, values = (
                jnp.reshape(fetched[slot, :, which, head], (at_once * page_size, dim))
                for which in (0, 1)
            )
            scores = _dot(queries_ref[head], keys, 1) * dim**-0.5
            _add(head, jnp.where(is_visible, scores, MASKED), values, sums, largest, totals)
        return upto

    sums[...], totals[...] = jnp.zeros_like(sums), jnp.zeros_like(totals)
    largest[...] = jnp.full_like(largest, MASKED)
    begun = jax.lax.fori_loop(0, copies.turns, over_pages, ahead[0])
    ahead[0], ahead[1] = begun - copies.turns, copies.slot(copies.turns)
    out_ref[...] = (sums[...] / totals[...][:, :, :1]).astype(out_ref.dtype)


def _clear(ahead, fetched) -> None:
    """Prepares for the first row: no page is being copied."""
    ahead[0], ahead[1] = 0, 0
    # Where no page is copied to, memory may hold a NaN, which a weight of 0 does not remove.
    fetched[:, :, 1] = jnp.zeros_like(fetched[:, :, 1])


def _pages(start_ref, length: int, page_size: int) -> tuple[Array, Array]:
    """Returns the number of pages that the program's row reads, and that the next row reads."""
    row, last = pl.program_id(0), pl.num_programs(0) - 1
    both = (start_ref[jnp.minimum(row + i, last)] + length for i in (0, 1))
    own, following = (pl.cdiv(tokens, page_size) for tokens in both)
    return own, jnp.where(row < last, following, 0)


@dataclass(frozen=True)
class _Copies:
    """The copies of a row's pages to vector memory. Turns behind its last are the next row's."""

    table: Any  # of the row and the next
    pools: tuple[Any, Any]  # of keys and values
    fetched: Any  # vector memory of all turns
    semaphores: Any
    pages: Array  # of the row
    next_pages: Array
    first_slot: Array  # where the row's first turn is

    @property
    def at_once(self) -> int:
        return self.fetched.shape[1]

    @property
    def turns(self) -> Array:
        return pl.cdiv(self.pages, self.at_once)

    @property
    def most_turns(self) -> Array:
        """The turns of both rows."""
        return self.turns + pl.cdiv(self.next_pages, self.at_once)

    def slot(self, turn: Array) -> Array:
        return jax.lax.rem(self.first_slot + turn, BUFFERS)

    def begin(self, turn: Array, carry: None) -> None:
        """Starts the copies of one turn."""
        is_next = (turn >= self.turns).astype(jnp.int32)
        first = (turn - is_next * self.turns) * self.at_once
        held = jnp.where(turn >= self.turns, self.next_pages, self.pages)
        slot = self.slot(turn)
        for i in range(self.at_once):
            page = self.table[is_next, 0, first + i]

            @pl.when(first + i < held)
            def start(i=i, page=page):
                for which, pool in enumerate(self.pools):
                    to = self.fetched.at[slot, i, which]
                    tpu.make_async_copy(pool.at[page], to, self.semaphores.at[slot]).start()

    def wait(self, turn: Array) -> Array:
        """Waits until as many bytes have arrived as the row's turn has. Returns its slot."""
        slot = self.slot(turn)
        held = self.pages - turn * self.at_once

        def arrive(ref: Any) -> None:
            tpu.make_async_copy(ref, ref, self.semaphores.at[slot]).wait()

        pl.when(held >= self.at_once)(lambda: arrive(self.fetched.at[slot]))

        @pl.when(held < self.at_once)
        def page_by_page():
            jax.lax.fori_loop(0, held, lambda i, _: arrive(self.fetched.at[slot, i]), None)

        return slot


def _add(head, scores, values, sums, largest, totals) -> None:
    """Adds keys and their `values`, given the keys' scores, to a head's running softmax."""
    old = largest[head][:, :1]
    new = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
    weights, kept = jnp.exp(scores - new), jnp.exp(old - new)
    total = totals[head][:, :1] * kept + jnp.sum(weights, axis=1, keepdims=True)
    sums[head] = sums[head] * kept + _dot(weights.astype(values.dtype), values, 0)
    largest[head] = jnp.broadcast_to(new, largest.shape[1:])
    totals[head] = jnp.broadcast_to(total, totals.shape[1:])


def _dot(x: Array, y: Array, contracted: int) -> Array:
    dims = (((1,), (contracted,)), ((), ()))
    return jax.lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)
