"""During a burst, rows take pages for new tokens from a reserve, on the devices.

So a row holds pages for its next few tokens, not for a whole burst that it may not finish. The host
fills the reserve (`page_reserve.py`). These are functions of one replica's arrays.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int

from pat_jax.engine.sequences.state import RowState
from pat_jax.models.cache.paged_layer import NULL_PAGE


def lacking(
    rows: RowState, tables: Int[Array, "rows width"], *, steps: int, page_size: int
) -> Int[Array, " rows"]:
    """Returns how many pages each running row lacks for `steps` tokens, or up to its end."""
    tokens = jnp.minimum(rows.position + steps, rows.end - 1)
    missing = -(-tokens // page_size) - num_held(tables)
    return jnp.where(rows.running, jnp.maximum(missing, 0), 0)


def num_held(tables: Int[Array, "rows width"]) -> Int[Array, " rows"]:
    """Returns the number of pages of each row."""
    return jnp.sum(tables != NULL_PAGE, axis=1, dtype=jnp.int32)


def draw(
    tables: Int[Array, "rows width"],
    more: Int[Array, " rows"],
    ring: Int[Array, " size"],
    drawn: Int[Array, ""],
    *,
    most: int,
) -> tuple[Int[Array, "rows width"], Int[Array, ""]]:
    """Adds `more` pages of the reserve to each row. Returns the tables, and the number of pages
    taken from the reserve so far.

    Args:
      ring: the pages of the reserve, see `ReservedPages`.
      drawn: number of pages taken from the reserve before.
      most: the most pages that a row takes.
    """
    column = jnp.arange(tables.shape[1])[None]
    held = num_held(tables)
    first = drawn + jnp.cumsum(more) - more
    for n in range(most):
        page = ring[(first + n) % len(ring)]
        is_next = (column == held[:, None] + n) & (n < more)[:, None]
        tables = jnp.where(is_next, page[:, None], tables)
    return tables, drawn + jnp.sum(more)


def added(
    tables: Int[Array, "rows width"], held: Int[Array, " rows"], *, most: int
) -> Int[Array, "rows most"]:
    """Returns the pages of each row after its first `held[row]` ones, filled up with NULL_PAGE."""
    at = held[:, None] + jnp.arange(most)[None]
    return jnp.take_along_axis(tables, at, axis=1, mode="fill", fill_value=NULL_PAGE)
