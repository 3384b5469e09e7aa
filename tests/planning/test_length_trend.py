"""The trend against the Kalman filter in matrix form, and on levels with a known answer."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.planning.lengths.trend import LEVEL_STEP, MAX_SLOPE, SLOPE_STEP, LengthTrend

FAR = 100.0
levels = st.lists(st.tuples(st.floats(-0.05, 0.05), st.floats(1e-3, 1.0)), min_size=1, max_size=8)


def follow(observations, variance: float, trend: LengthTrend | None = None) -> LengthTrend:
    trend = trend or LengthTrend()
    for level in observations:
        trend = trend.observed(level, variance).next(FAR)
    return trend


@given(levels)
def test_it_is_the_kalman_filter_of_a_local_linear_trend(observations):
    """Harvey 1989, equations 3.2.3 and 3.2.4, with T = [[1, 1], [0, 1]]."""
    move, seen = np.array([[1.0, 1.0], [0.0, 1.0]]), np.array([[1.0, 0.0]])
    trend = LengthTrend()
    state = np.zeros(2)
    covariance = np.diag([trend.level_variance, trend.slope_variance])
    for level, variance in observations:
        gain = covariance @ seen.T / (seen @ covariance @ seen.T + variance)
        state = state + (gain * (level - state[0])).ravel()
        covariance = covariance - gain @ seen @ covariance
        state, covariance = move @ state, move @ covariance @ move.T
        covariance += np.diag([LEVEL_STEP**2, SLOPE_STEP**2])
        trend = trend.observed(level, variance).next(FAR)
    np.testing.assert_allclose([trend.level, trend.slope], state, atol=1e-12)
    got = [trend.level_variance, trend.covariance, trend.slope_variance]
    np.testing.assert_allclose(got, covariance[[0, 0, 1], [0, 1, 1]], atol=1e-12)


def test_steady_growth_is_carried_on():
    trend = follow(0.02 * np.arange(60), 0.02**2)
    assert trend.slope == pytest.approx(0.02, abs=0.002)
    assert trend.level == pytest.approx(0.02 * 60, abs=0.005)  # of the iteration to come


def test_a_noisy_level_is_hardly_followed():
    start = follow(np.zeros(30), 0.01)
    assert abs(follow([0.5], 100.0, start).level) < 0.01
    assert follow([0.5], 1e-6, start).level > 0.45


def test_a_jump_is_no_slope():
    trend = follow([0.0, 3.0], 1e-6)
    assert abs(trend.slope) <= MAX_SLOPE
    assert LengthTrend(level=2.0).next(largest=1.5).level == 1.5


@pytest.mark.parametrize("jump", [np.log(1.5), np.log(4), -np.log(2)])
@pytest.mark.parametrize("noise", [1e-4, 3e-3])
def test_after_a_jump_the_level_is_there_and_goes_no_further(jump, noise):
    """Seen: 23 % too long two iterations after lengths rose, 16 % nine iterations after."""
    trend = follow([0.0] * 10, noise)
    for _ in range(10):
        trend = follow([jump], noise, trend)
        assert trend.level == pytest.approx(jump, abs=0.03 + 2 * noise**0.5 / 10)
        assert abs(trend.slope) < 0.01


def test_two_jumps_in_turn_are_both_believed():
    trend = follow([0.0] * 10 + [1.0, 0.0], 1e-3)
    assert trend.level == pytest.approx(0.0, abs=0.05)
