"""Which rows a batch has: each once an epoch, none beside one that is alike, whatever was drawn before."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.rl.data.epochs import Cursor, Epochs

keys = st.lists(st.integers(0, 12), min_size=1, max_size=40)
seeds = st.integers(0, 2**32 - 1)


@given(st.data(), keys, seeds)
def test_a_batch_has_no_two_rows_alike_unless_it_must(data, alike, seed: int):
    epochs, cursor = Epochs(alike, seed=seed), Cursor()
    drawn: Counter[tuple[int, int]] = Counter()
    for size in data.draw(st.lists(st.integers(1, len(alike)), min_size=1, max_size=12)):
        rows, after = epochs.draw(cursor, size)
        assert (rows, after) == Epochs(alike, seed=seed).draw(cursor, size)  # a pure function
        assert len(rows) == size == len(set(rows))
        if size <= len(set(alike)):
            assert len({alike[row] for row in rows}) == size
        drawn.update((after.epoch, row) for row in rows)
        cursor = after
    assert max(drawn.values()) == 1  # no row twice in an epoch


@given(st.data(), st.integers(1, 60), seeds)
def test_where_none_are_alike_an_epoch_has_every_row_once_however_it_is_cut(data, count, seed):
    epochs, cursor, seen = Epochs(range(count), seed=seed), Cursor(), list[int]()
    while len(seen) < count:
        size = data.draw(st.integers(1, count - len(seen)))
        rows, cursor = epochs.draw(cursor, size)
        seen += rows
    assert sorted(seen) == list(range(count))
    assert seen == np.random.default_rng((seed, 0)).permutation(count).tolist()
    assert epochs.draw(cursor, 1)[1] == Cursor(1, 1)


@given(st.integers(1, 8), st.integers(2, 30), st.integers(2, 6), seeds)
def test_rows_that_are_alike_are_spread_over_the_epoch(size, different, copies, seed):
    size = min(size, different)
    epochs, cursor, drawn = Epochs([*range(different)] * copies, seed=seed), Cursor(), Counter()
    for _ in range(different * copies // size):
        rows, cursor = epochs.draw(cursor, size)
        drawn.update(row % different for row in rows)
    assert cursor.epoch == 0  # nothing is passed over where it need not be
    assert max(drawn.values()) - min(drawn.values()) <= 1 + (size - 1 > 0)


def test_what_an_epoch_passes_over_comes_in_another():
    alike = [*range(9), "twice", "twice", "twice"]
    epochs, cursor, seen = Epochs(alike, seed=3), Cursor(), Counter()
    for _ in range(60):
        rows, cursor = epochs.draw(cursor, 10)
        seen.update(rows)
    assert set(seen) == set(range(12)) and all(seen[row] == 60 for row in range(9))
    assert all(seen[row] > 5 for row in range(9, 12))


@pytest.mark.parametrize("size", [0, 4])
def test_a_batch_that_cannot_be_is_refused(size: int):
    with pytest.raises(ValueError, match=f"a batch of {size}: expected from 1 to 3 rows"):
        Epochs("abc", seed=0).draw(Cursor(), size)


def test_a_cursor_behind_the_end_begins_the_next_epoch():
    assert Epochs("abc", seed=0).draw(Cursor(2, 50), 2)[1] == Cursor(3, 2)
