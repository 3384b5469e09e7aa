"""A profile put right: by layout, by one factor, and only past the noise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.engine.warm_up.timings import NOISE, changes, rescaled
from pat_jax.planning.types import Split

DP2, TP2 = Split(2, 1), Split(1, 2)
seconds = st.floats(1e-6, 1e3)


@given(
    known=st.dictionaries(st.tuples(st.sampled_from([DP2, TP2]), st.integers(1, 9)), seconds),
    factor=st.floats(0.01, 100.0),
)
def test_a_layout_that_takes_some_times_as_long_is_scaled_and_the_other_is_not(known, factor):
    again = {key: s * (factor if key[0] == TP2 else 1.0) for key, s in known.items()}
    told = rescaled(known, again)
    for key, before in known.items():
        has_changed = key[0] == TP2 and not 1 / NOISE <= factor <= NOISE
        assert told[key] == pytest.approx(before * (factor if has_changed else 1.0), rel=1e-6)


def test_one_odd_run_among_several_changes_nothing():
    known = {(DP2, rows): 0.1 * rows for rows in (1, 2, 4)}
    assert changes(known, {**known, (DP2, 2): 30.0}) == {}


def test_a_switch_is_its_pair_of_layouts_in_that_order():
    known = {(DP2, TP2, "all"): 1.0, (TP2, DP2, "all"): 1.0}
    assert changes(known, {(DP2, TP2, "all"): 9.0}) == {(DP2, TP2): 9.0}


def test_a_sample_stands_for_layouts_that_were_not_run_again():
    known = {(DP2, 1): 1.0, (DP2, 64): 2.0, (TP2, 1): 1.0}
    assert rescaled(known, {(DP2, 1): 3.0}, DP2) == {(DP2, 1): 3.0, (DP2, 64): 6.0, (TP2, 1): 3.0}
    both = {(DP2, 1): 3.0, (TP2, 1): 1.0}
    assert rescaled(known, both, DP2) == {(DP2, 1): 3.0, (DP2, 64): 6.0, (TP2, 1): 1.0}
