"""Times between and past measured points: exact where measured, in range between, never falling."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.interpolate import RegularGridInterpolator

from pat_jax.planning.latency.step_model import Physics, Surface

SIZES = st.lists(st.integers(1, 5000), min_size=1, max_size=6, unique=True).map(sorted)
SECONDS = st.floats(1e-6, 10.0)
ROUNDING = 1 + 1e-9


@st.composite
def grids(draw, *, is_rising: bool = False) -> tuple[list[int], list[int], np.ndarray]:
    """Rows, lengths and seconds[row, length]."""
    rows, lengths = draw(SIZES), draw(SIZES)
    count = len(rows) * len(lengths)
    seconds = np.reshape(draw(st.lists(SECONDS, min_size=count, max_size=count)), (len(rows), -1))
    return rows, lengths, seconds.cumsum(axis=0).cumsum(axis=1) if is_rising else seconds


def surface(rows: list[int], lengths: list[int], seconds: np.ndarray) -> Surface:
    return Surface(
        {(n, m): float(seconds[i, j]) for i, n in enumerate(rows) for j, m in enumerate(lengths)}
    )


@given(grids())
def test_a_measured_point_costs_what_was_measured(grid):
    fitted = surface(*grid)
    assert {at: fitted(*at) for at in fitted.points} == fitted.points


@given(grids(), st.floats(0, 1), st.floats(0, 1))
def test_between_measured_points_lie_straight_lines(grid, row_share, length_share):
    rows, lengths, seconds = grid
    n = round(rows[0] + row_share * (rows[-1] - rows[0]))
    m = round(lengths[0] + length_share * (lengths[-1] - lengths[0]))
    axes = tuple(np.array(steps, float) for steps in (rows, lengths) if len(steps) > 1)
    at = [x for x, steps in ((n, rows), (m, lengths)) if len(steps) > 1]
    if axes:
        expected = RegularGridInterpolator(axes, seconds.squeeze())(at).item()
        assert surface(*grid)(n, m) == pytest.approx(expected)
    i, j = np.searchsorted(rows, n), np.searchsorted(lengths, m)
    around = seconds[max(i - 1, 0) : i + 1, max(j - 1, 0) : j + 1]
    assert around.min() / ROUNDING <= surface(*grid)(n, m) <= around.max() * ROUNDING


@given(grids(is_rising=True), *[st.integers(1, 20_000)] * 4)
def test_more_work_never_costs_less_where_none_did(grid, n, more_n, m, more_m):
    """Within the grid, past its ends and below it."""
    fitted = surface(*grid)
    (n, more_n), (m, more_m) = sorted((n, more_n)), sorted((m, more_m))
    assert 0 < fitted(n, m) <= fitted(more_n, more_m) * ROUNDING


@given(grids(), *[st.integers(0, 20_000)] * 4)
def test_past_the_last_point_times_never_fall_however_noisy(grid, n, more_n, m, more_m):
    rows, lengths, _ = grid
    fitted = surface(*grid)
    (n, more_n), (m, more_m) = sorted((n, more_n)), sorted((m, more_m))
    for row in rows:
        line = [fitted(row, lengths[-1] + extra) for extra in (0, m, more_m)]
        assert line[0] <= line[1] * ROUNDING and line[1] <= line[2] * ROUNDING
    for length in lengths:
        line = [fitted(rows[-1] + extra, length) for extra in (0, n, more_n)]
        assert line[0] <= line[1] * ROUNDING and line[1] <= line[2] * ROUNDING


@given(st.floats(1e-4, 1e-1), st.floats(0, 1e-3), st.floats(0, 1e-6))
def test_a_step_that_is_physics_is_predicted_beyond_the_profile(fixed, per_row, per_token):
    """Up to four times the rows and the length of the largest measured point."""
    truth = Physics(fixed, per_row, per_token)
    rows, lengths = (1, 2, 4, 8, 16, 32, 64), (256, 512, 1024, 2048, 4096)
    measured = Surface({(n, m): truth(n, m) for n in rows for m in lengths})
    for n, m in ((24, 8192), (64, 16_384), (256, 4096), (256, 16_384)):
        assert measured(n, m) == pytest.approx(truth(n, m), rel=0.02)


def test_one_point_grows_with_the_work_but_less_than_in_proportion():
    """Nothing tells its parts apart: they are taken to be equal."""
    alone = Surface({(8, 100): 3.0})
    assert alone(4, 50) == alone(8, 50) == 3.0  # what the smallest bucket costs
    assert alone(16, 100) == pytest.approx(5.0)  # two parts of three grow with the rows
    assert alone(8, 200) == pytest.approx(4.0)
    assert alone(16, 200) == pytest.approx(7.0)


def test_a_grid_may_have_holes():
    """An interrupted measurement: the rows of the longer cache are not all there."""
    truth = Physics(1.0, 0.1, 0.001)
    known = {(n, m): truth(n, m) for n in (4, 8, 16) for m in (64, 128)}
    del known[8, 64], known[16, 128]
    partial = Surface(known)
    for n in (4, 8, 16):
        for m in (64, 128):
            assert partial(n, m) == pytest.approx(truth(n, m), rel=0.25)
    assert partial(8, 128) == known[8, 128]


@given(grids())
def test_no_part_of_the_physics_is_negative(grid):
    fitted = surface(*grid).physics
    assert min(fitted.fixed, fitted.per_row, fitted.per_token) >= 0
    assert max(fitted.fixed, fitted.per_row, fitted.per_token) > 0
