"""Accounts of pages, by cases with a known answer; `test_serving.py` has them at length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices_draw import drawn_in_a_burst
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_jax.engine.device.decode.page_append import added, draw, lacking, num_held
from pat_jax.engine.sequences.page_allocator import NULL_PAGE, PageAllocator
from pat_jax.engine.sequences.state import ReservedPages, RowState


def tokens_of(number: int, length: int) -> np.ndarray:
    return number * 1000 + np.arange(length)


def test_samples_of_a_prompt_share_all_but_the_page_they_write():
    pool = PageAllocator(100, 4)
    first, second, third = (pool.admit(tokens_of(1, 11), room=3) for _ in range(3))
    assert first and second and third
    assert (first.num_cached, first.copy) == (0, None)
    assert first.pages[:2].tolist() == second.pages[:2].tolist() == third.pages[:2].tolist()
    for other in (second, third):
        assert other.num_cached == 10
        assert other.copy == (first.pages[2], other.pages[2])
    # Two shared, and each the part page and one more for tokens 10 … 12.
    assert pool.capacity - pool.num_free == 2 + 3 * 2


def test_a_common_beginning_is_shared_up_to_the_last_full_page():
    pool = PageAllocator(100, 4)
    one = pool.admit(np.array([9] * 10 + [1, 2, 3]), room=0)
    two = pool.admit(np.array([9] * 10 + [3, 2, 1]), room=0)
    assert one and two
    assert (two.num_cached, two.copy) == (8, None)
    assert (one.pages[:2] == two.pages[:2]).all() and one.pages[2] != two.pages[2]


def test_a_part_page_that_was_let_go_is_taken_over_without_a_copy():
    pool = PageAllocator(100, 4)
    first = pool.admit(tokens_of(1, 11), room=1)
    assert first
    pool.release(first.pages)
    second, third = pool.admit(tokens_of(1, 11), room=1), pool.admit(tokens_of(1, 11), room=1)
    assert second and third
    assert (second.num_cached, second.copy) == (10, None)
    assert second.pages.tolist() == first.pages.tolist()
    assert third.copy == (first.pages[2], third.pages[2])


def test_pages_let_go_longest_ago_are_given_out_first():
    pool = PageAllocator(1 + 3 * 2, 4)  # room for three prompts
    for number in (0, 1, 2, 0):  # prompt 0 is used twice
        admitted = pool.admit(tokens_of(number, 9), room=0)
        assert admitted
        pool.release(admitted.pages)
    assert pool.num_free == pool.capacity
    assert pool.admit(tokens_of(3, 5), room=0)  # takes the last page of prompt 1
    for number, length, num_cached in ((0, 9, 8), (2, 9, 8), (1, 5, 4)):
        admitted = pool.admit(tokens_of(number, length), room=0)
        assert admitted and admitted.num_cached == num_cached


def test_a_part_page_is_not_found_by_what_it_held_when_it_holds_something_else():
    """Two tokens of a prompt, then two more in the same page, then another sequence's."""
    pool = PageAllocator(1 + 2, 4)
    first = pool.admit(tokens_of(1, 3), room=2)
    assert first and len(first.pages) == 1
    pool.index(tokens_of(1, 5), first.pages)
    pool.release(first.pages)
    again = pool.admit(tokens_of(1, 5), room=0)
    assert again and again.num_cached == 4 and again.pages.tolist() == first.pages.tolist()
    pool.release(again.pages)
    others = pool.admit(tokens_of(2, 9), room=0)
    assert others and first.pages[0] in others.pages
    pool.release(others.pages)
    for length in (3, 5):
        found = pool.admit(tokens_of(1, length), room=0)
        assert found and (found.num_cached, found.copy) == (0, None)
        pool.release(found.pages)
        pool.forget_prefixes()


def test_pages_of_what_another_has_said_as_well_are_not_found_behind_others():
    """Two say the same, one of them more; of the other's pages the first two can be found twice or not
    at all, and so the third must not be: those before it come to hold something else."""
    pool, same = PageAllocator(100, 4), tokens_of(1, 13)
    one, other = pool.take(2), pool.take(3)
    assert one is not None and other is not None
    for tokens, pages in ((same[:9], one), (same, other)):
        pool.index(tokens, pages)
        pool.release(pages)
    text = tokens_of(2, 9)
    instead = pool.admit(text, room=0)
    assert instead and instead.pages.tolist() == other[:2].tolist()
    longer = pool.admit(np.concatenate([text[:8], same[8:]]), room=0)
    assert longer and longer.num_cached == 8
    first = pool.admit(same, room=0)
    assert first and first.num_cached == 8 and first.pages[:2].tolist() == one.tolist()


def test_what_is_found_counts_when_pages_are_few():
    pool = PageAllocator(1 + 4, 4)
    assert pool.admit(tokens_of(1, 13), room=0)  # three pages
    assert pool.admit(tokens_of(2, 13), room=0) is None
    assert pool.admit(tokens_of(1, 13), room=1)  # three that are there and one more
    assert pool.num_free == 0


def test_prefixes_are_forgotten():
    pool = PageAllocator(100, 4)
    in_flight, done = (pool.admit(tokens_of(number, 9), room=0) for number in (1, 2))
    assert in_flight and done
    pool.release(done.pages)
    pool.forget_prefixes()
    for number in (1, 2):
        again = pool.admit(tokens_of(number, 9), room=0)
        assert again and again.num_cached == 0
        pool.release(again.pages)
    pool.release(in_flight.pages)
    assert pool.num_free == pool.capacity


def test_pages_are_released_once():
    pool = PageAllocator(5, 4)
    pages = pool.take(2)
    assert pages is not None
    with pytest.raises(ValueError, match="is released, but nobody holds it"):
        pool.release(pages, pages)
    assert pool.num_free == 2
    pool.release(pages)
    with pytest.raises(ValueError, match="is released, but nobody holds it"):
        pool.release(pages)


def test_a_shared_page_is_let_go_behind_all_that_follow_it():
    """Two that begin alike end together, and their first page is needed for something else: what stood
    behind it must not be found behind what lies there then."""
    begins, other = [1] * 4, [9] * 4
    pool = PageAllocator(5, 4)
    texts = [[*begins, 2, 2, 2, 2, 7], [*begins, 3, 3, 3, 3, 4, 4, 4, 4, 7]]
    held = [pool.admit(np.array(text), 0) for text in texts]
    pool.release(*(one.pages for one in held if one))
    pool.check_integrity(np.zeros(5, int))
    third = pool.admit(np.array([*other, 7]), 0)
    assert third is not None and third.num_cached == 0
    fourth = pool.admit(np.array([*other, 3, 3, 3, 3, 7]), 0)
    assert fourth is not None and fourth.num_cached == 4, "its own first page, and no more"


# --- pages drawn on devices, against the same in plain Python -------------------------------------

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
