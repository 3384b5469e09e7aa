"""Pages drawn on devices against the same in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
from devices_draw import drawn_in_a_burst
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_jax.engine.device.decode.page_append import added, draw, lacking, num_held
from pat_jax.engine.sequences.page_allocator import NULL_PAGE
from pat_jax.engine.sequences.state import ReservedPages, RowState

ROWS, WIDTH, SIZE, PAGE, CHECK = 5, 9, 11, 4, 6
STEPS = 18
MOST = -(-STEPS // PAGE)


@jax.jit
def a_few_steps(rows: RowState, tables: jax.Array, ring: jax.Array, drawn: jax.Array):
    more = lacking(rows, tables, steps=CHECK, page_size=PAGE)
    return more.sum(), *draw(tables, more, ring, drawn, most=-(-CHECK // PAGE))


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 25), st.integers(0, SIZE))
def test_rows_draw_what_their_next_tokens_need(seed, drawn, left):
    """A ring that has gone round, rows that end, and a reserve that may run out."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 15, ROWS)
    end = tokens + 1 + rng.integers(1, 20, ROWS)
    generated = np.minimum(rng.integers(0, STEPS + 4, ROWS), end - tokens - 1)
    held = np.where(generated > 0, -(-tokens // PAGE) + rng.integers(0, 2, ROWS), 0)
    tables = np.where(np.arange(WIDTH) < held[:, None], 100 + np.arange(WIDTH), NULL_PAGE)
    reserved = ReservedPages(
        rng.permutation(SIZE)[None].astype(np.int32) + 1, np.array([drawn + left])
    )
    sizes = {"steps": STEPS, "check_every": CHECK, "page_size": PAGE}
    expected, steps = drawn_in_a_burst(held, tokens, end, generated, reserved, [drawn], **sizes)

    now, have, done = jnp.int32(drawn), jnp.asarray(tables, jnp.int32), 0
    while done < STEPS and (generated > done).any():
        rows = RowState.empty(ROWS)
        rows.position[:], rows.end[:] = tokens + np.minimum(done, generated), end
        rows.running[:] = generated > done
        more, after, drawn_after = a_few_steps(rows, have, jnp.asarray(reserved.pages[0]), now)
        if int(more) > int(reserved.filled[0]) - int(now):
            break
        have, now, done = after, drawn_after, done + CHECK
    assert done == steps
    new = added(have, num_held(jnp.asarray(tables)), most=MOST)
    assert [[page for page in row if page != NULL_PAGE] for row in new.tolist()] == expected
    assert int(now) == drawn + sum(map(len, expected))
    is_old = np.arange(WIDTH) < held[:, None]
    np.testing.assert_array_equal(np.asarray(have)[is_old], tables[is_old])
