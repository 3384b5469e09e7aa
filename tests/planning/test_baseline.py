"""The baseline against Kaplan and Meier's estimator, worked out response by response."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pat_jax.planning.lengths.baseline import Baseline

CAP = 12
responses = st.lists(st.tuples(st.integers(1, CAP), st.booleans()), min_size=1, max_size=40)


def learned(pairs, prior_weight: float = 1e-9, cap: int = CAP) -> Baseline:
    lengths, is_cut = np.array([n for n, _ in pairs]), np.array([cut for _, cut in pairs])
    return Baseline.empty(cap, prior_weight).plus(lengths, is_cut)


def survival(baseline: Baseline, tokens: np.ndarray) -> np.ndarray:
    return np.exp(baseline.log_survival[baseline.bins(tokens)])


def kaplan_meier(pairs, t: float) -> float:
    """P(length > t): the product over the moments of an end, each response looked at."""
    product = 1.0
    for moment in sorted({length for length, cut in pairs if not cut and length <= t}):
        at_risk = sum(length >= moment for length, _ in pairs)
        ended = sum(length == moment and not cut for length, cut in pairs)
        product *= 1 - ended / at_risk
    return product


@given(responses)
def test_without_a_prior_it_is_kaplan_and_meiers(pairs):
    seen = max(length for length, _ in pairs)
    expected = [kaplan_meier(pairs, t) for t in range(seen + 1)]
    baseline = learned(pairs)
    np.testing.assert_allclose(survival(baseline, np.arange(seen + 1)), expected, atol=1e-6)
    at = baseline.bins(np.arange(seen + 1))
    np.testing.assert_allclose(baseline.empirical[at], expected, rtol=1e-12, atol=1e-15)


@given(st.lists(st.tuples(st.integers(1, 9000), st.booleans()), min_size=1, max_size=60))
@example([(5591, True), (5592, False), (5649, True)])
def test_long_lengths_are_told_apart_to_one_percent(pairs):
    baseline, tokens = learned(pairs, cap=9000), np.array([n for n, _ in pairs])
    # What is cut within a bin is at risk in all of it.
    later = [(1.01 * n if is_cut else n, is_cut) for n, is_cut in pairs]
    above = [kaplan_meier(later, 0.99 * t) for t in tokens]
    below = [kaplan_meier(pairs, 1.01 * t) for t in tokens]
    alive = baseline.empirical[baseline.bins(tokens)]
    # Ends that share a bin share their risk: the product may differ within the bin.
    assert (alive <= np.array(above) + 1e-9).all() and (alive >= np.array(below) - 1e-9).all()


def test_with_nothing_seen_the_prior_speaks():
    """A constant hazard: forgetful, and some still run at the cap."""
    tokens = np.array([100, 300, 600, 1000])
    expected = np.exp(-2 * tokens / 1000)
    np.testing.assert_allclose(survival(Baseline.empty(1000), tokens), expected, rtol=0.02)


class TestTail:
    """Beyond the longest response seen: Pareto lengths go on as Pareto, light tails do not."""

    @staticmethod
    def doubling(lengths: np.ndarray, cap: int = 10**6) -> float:
        baseline = Baseline.empty(cap).plus(lengths, np.zeros(len(lengths), bool))
        longest = int(lengths.max())
        one, two = survival(baseline, np.array([longest, 2 * longest]))
        return two / one

    @pytest.mark.parametrize("alpha", [1.2, 2.0, 3.0])
    def test_of_a_power_law_is_that_power_law(self, alpha):
        rng = np.random.default_rng(5)
        lengths = np.rint(50 * (1 - rng.random(4000)) ** (-1 / alpha)).astype(int)
        assert self.doubling(lengths) == pytest.approx(2**-alpha, abs=0.1)

    def test_of_a_light_tail_is_lighter(self):
        rng = np.random.default_rng(5)
        assert self.doubling(rng.normal(500, 50, 4000).astype(int)) < 0.02

    def test_the_longest_response_is_not_the_longest_possible(self):
        baseline = Baseline.empty(4096).plus(np.full(1000, 300), np.zeros(1000, bool))
        assert 0 < survival(baseline, np.array([400]))[0] < 1e-2
