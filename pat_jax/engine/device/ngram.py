"""N-gram drafts: what followed the longest match of a row's newest tokens in its texts.

A row's text is one array. It begins with other texts for the same prompt, which the host has laid
out: those of siblings and earlier iterations. The row's own tokens follow, by position. Entries
that are not tokens are negative, and no match crosses them.

The longest match is found without a suffix tree: all columns of the text are compared at once.
These are functions of one device's rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from pat_jax.engine.sequences.sequence_table import NO_TOKEN

CONTEXT = 16  # most tokens of a match: longer ones draft no better (`python -m benchmarks.speculation.draft_acceptance`)


class Draft(NamedTuple):
    tokens: Int[Array, "rows draft"]  # NO_TOKEN after the last
    matched: Int[Array, " rows"]  # length of the match in tokens, 0 if there is none
    at: Int[Array, " rows"]  # column of the match's last token; 0 if the draft is not copied


def find(
    text: Int[Array, "rows columns"], newest: Int[Array, " rows"], *, most: int
) -> tuple[Draft, Draft]:
    """Returns a draft and a branch for each row.

    The draft is what followed the longest match of the tokens up to column `newest`; of equally
    long matches the last counts. The branch follows the longest match with another next token.

    Args:
      most: the most tokens of a draft.
    """
    columns = text.shape[1]
    before = jnp.pad(text, ((0, 0), (CONTEXT, 0)), constant_values=NO_TOKEN)
    recent = _windows(before, newest + 1, CONTEXT)
    run = jnp.zeros(text.shape, jnp.int32)
    goes_on = jnp.ones(text.shape, bool)
    for back in range(CONTEXT):
        there = jax.lax.slice_in_dim(before, CONTEXT - back, CONTEXT - back + columns, axis=1)
        token = recent[:, CONTEXT - 1 - back, None]
        goes_on = goes_on & (there == token) & (token >= 0)
        run = run + goes_on
    following = jnp.pad(text[:, 1:], ((0, 0), (0, 1)), constant_values=NO_TOKEN)
    place = jnp.arange(columns, dtype=jnp.int32)[None]
    ahead = 1 + jnp.arange(most, dtype=jnp.int32)[None]

    def longest(is_wanted: Array) -> Draft:
        # The longest match counts, of equally long ones the last.
        best = jnp.max(jnp.where(is_wanted, run * columns + place, 0), axis=1)
        matched = best // columns
        at = best % columns
        column = at[:, None] + ahead
        tokens = jnp.take_along_axis(text, jnp.minimum(column, columns - 1), axis=1)
        is_token = (tokens >= 0) & (column < columns)
        is_text = jnp.cumprod(is_token, axis=1) * (matched > 0)[:, None] > 0
        return Draft(jnp.where(is_text, tokens, NO_TOKEN), matched, at)

    draft = longest(following >= 0)
    return draft, longest((following >= 0) & (following != draft.tokens[:, :1]))


def append(
    text: Int[Array, "rows columns"],
    tokens: Int[Array, "rows some"],
    count: Int[Array, " rows"],
    at: Int[Array, " rows"],
) -> Int[Array, "rows columns"]:
    """Returns the text with the first `count` of each row's `tokens` from column `at` on, and
    NO_TOKEN behind them."""
    is_new = jnp.arange(tokens.shape[1])[None] < count[:, None]
    return put_windows(text, jnp.where(is_new, tokens, NO_TOKEN), at)


def _windows(x: Int[Array, "rows columns"], at: Int[Array, " rows"], size: int) -> Array:
    return jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, size))(x, at)


def put_windows(
    x: Shaped[Array, "rows columns *rest"],
    new: Shaped[Array, "rows some *rest"],
    at: Int[Array, " rows"],
) -> Array:
    """Returns `x` with each row's `new` entries written from its column `at` on."""

    def in_turn(x: Array, new: Array, at: Array) -> Array:
        def put(row: Int[Array, ""], x: Array) -> Array:
            one = jax.lax.dynamic_index_in_dim(new, row)
            return jax.lax.dynamic_update_slice(x, one, (row, at[row], *[0] * (x.ndim - 2)))

        return jax.lax.fori_loop(0, len(at), put, x)

    def at_once(x: Array, new: Array, at: Array) -> Array:
        put = jax.lax.dynamic_update_slice_in_dim
        return jax.vmap(lambda row, new, at: put(row, new, at, axis=0))(x, new, at)

    # XLA:CPU may copy all of `x` for a scatter.
    return jax.lax.platform_dependent(x, new, at, cpu=in_turn, default=at_once)
