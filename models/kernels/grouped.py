"""Groups rows by the expert that computes them, in tiles of one expert each.

A tile holds at most `size` rows of one expert; the last tile of an expert may have empty slots. The
loop over tiles stops after the last one in use, so that a step reads only the weights of the
experts that its rows chose.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LARGEST_TILE = 128  # rows; with more a product with one expert's weights is no faster

Experts = Any  # a pytree of arrays whose first dimension is the expert


class Tiles(NamedTuple):
    """Assigns each choice (a row with one of its k experts) to a slot of a tile. All rows of a tile
    have the same expert."""

    choice: Int[Array, "tiles size"]  # row · k + index among the row's experts; rows · k: empty
    expert: Int[Array, " tiles"]
    slot: Int[Array, "rows k"]  # tile · size + slot in the tile; tiles · size: on other devices
    count: Int[Array, ""]  # number of tiles in use; they come first


def tile_size(rows: int, per_token: int, num_experts: int) -> int:
    """Returns the number of rows in a tile: a power of two near the mean rows per expert."""
    size = 1
    mean = rows * per_token // num_experts
    while size < min(mean, rows, LARGEST_TILE):
        size *= 2
    return size


def in_tiles(chosen: Int[Array, "rows k"], num_experts: int, size: int) -> Tiles:
    """Returns the rows grouped by expert.

    Args:
      chosen: experts of each row. Those below 0 or from `num_experts` on are on other devices.
      size: number of rows in a tile.
    """
    num_rows, k = chosen.shape
    num_choices = num_rows * k
    num_tiles = num_choices // size + min(num_experts, num_choices)
    is_here = (chosen >= 0) & (chosen < num_experts)
    expert = jnp.where(is_here, chosen, num_experts).reshape(-1)
    order = jnp.argsort(expert, stable=True)
    rows_of = jnp.bincount(expert, length=num_experts + 1)
    tiles_of = -(-rows_of[:num_experts] // size)
    first_row = jnp.cumsum(rows_of) - rows_of
    ends = jnp.cumsum(tiles_of)
    first_slot = jnp.append((ends - tiles_of) * size, 0)
    place = jnp.arange(num_choices) - first_row[expert[order]]
    slots = jnp.where(
        expert[order] < num_experts, first_slot[expert[order]] + place, num_tiles * size
    )
    choice = jnp.full(num_tiles * size, num_choices).at[slots].set(order, mode="drop")
    return Tiles(
        choice=choice.reshape(num_tiles, size),
        expert=jnp.minimum(
            # "compare_all" is one kernel on an accelerator; a binary search is a loop.
            jnp.searchsorted(ends, jnp.arange(num_tiles), side="right", method="compare_all"),
            num_experts - 1,
        ),
        slot=jnp.zeros(num_choices, slots.dtype).at[order].set(slots).reshape(num_rows, k),
        count=ends[-1],
    )


def by_expert(
    compute: Callable[[Experts, Array], Array],
    experts: Experts,
    x: Float[Array, "rows in"],
    chosen: Int[Array, "rows k"],
    weights: Float[Array, "rows k"],
    size: int,
) -> Float[Array, "rows out"]:
    """Returns each row's weighted sum of its experts' outputs, for the experts on this device.

    Args:
      compute: maps one expert's weights and rows[size, in] to results[size, out].
      experts: the weights of the experts on this device.
      chosen: each row's experts, as indices into `experts`; any other number adds nothing.
      weights: weight of each chosen expert's output.
      size: number of rows in a tile.
    """
    num_here = len(jax.tree.leaves(experts)[0])
    tiles = in_tiles(chosen, num_here, size)
    k = chosen.shape[1]
    rows = jnp.take(x, tiles.choice // k, axis=0, mode="fill", fill_value=0)
    results: Array = _run_tiles(compute, experts, rows, tiles.expert, tiles.count)
    results = results.reshape(-1, results.shape[-1])
    each = jnp.take(results, tiles.slot, axis=0, mode="fill", fill_value=0)
    return jnp.einsum("rk,rko->ro", weights.astype(each.dtype), each)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_tiles(
    compute: Callable[[Experts, Array], Array],
    experts: Experts,
    rows: Float[Array, "tiles size in"],
    expert: Int[Array, " tiles"],
    count: Int[Array, ""],
) -> Float[Array, "tiles size out"]:
    """Applies `compute` to each tile in use; the other tiles' results are zeros.

    The number of tiles in use is an array. JAX does not differentiate loops of so many turns, so
    there is a rule below, which keeps the rows and recomputes each tile.
    """
    out = jax.eval_shape(compute, _of_expert(experts, jnp.int32(0)), rows[0])

    def one_tile(i: Array, results: Array) -> Array:
        result = compute(_of_expert(experts, expert[i]), rows[i])
        return jax.lax.dynamic_update_index_in_dim(results, result, i, 0)

    results = jnp.zeros((len(rows), *out.shape), out.dtype)
    return jax.lax.fori_loop(0, count, one_tile, results)


def _forward(
    compute: Callable, experts: Experts, rows: Array, expert: Array, count: Array
) -> tuple[Array, tuple]:
    return _run_tiles(compute, experts, rows, expert, count), (experts, rows, expert, count)


def _backward(compute: Callable, kept: tuple, grad: Array) -> tuple:
    experts, rows, expert, count = kept

    def one_tile(i: Array, sums: tuple[Experts, Array]) -> tuple[Experts, Array]:
        to_experts, to_rows = sums
        _, pullback = jax.vjp(compute, _of_expert(experts, expert[i]), rows[i])
        more, to_tile = pullback(grad[i])
        to_experts = jax.tree.map(
            lambda total, new: jax.lax.dynamic_update_index_in_dim(
                total, total[expert[i]] + new.astype(total.dtype), expert[i], 0
            ),
            to_experts,
            more,
        )
        return to_experts, jax.lax.dynamic_update_index_in_dim(to_rows, to_tile, i, 0)

    # Each tile of an expert adds to its gradient: the sum is in float32, also for bfloat16 weights.
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), experts)
    sums = jax.lax.fori_loop(0, count, one_tile, (zeros, jnp.zeros_like(rows)))
    to_experts, to_rows = sums
    to_experts = jax.tree.map(lambda total, x: total.astype(x.dtype), to_experts, experts)
    return to_experts, to_rows, None, None


_run_tiles.defvjp(_forward, _backward)


def _of_expert(experts: Experts, i: Array) -> Experts:
    # Ties the weights to the index, which changes: XLA:CPU slices bfloat16 as float32, and would
    # convert the weights of all experts before the loop.
    experts, i = jax.lax.optimization_barrier((experts, i))
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), experts)
