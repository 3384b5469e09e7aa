"""pass@k, maj@k and intervals against brute force: every subset, every order, and repeated draws."""

import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.rl.pass_at_k import NORMAL_95, Estimate, majority_passes, pass_at_k

ROWS = st.lists(st.booleans(), min_size=1, max_size=9)


def one(passes: list[bool], k: int) -> float:
    return float(pass_at_k(np.array([len(passes)]), np.array([sum(passes)]), k)[0])


@given(ROWS, st.integers(1, 9))
def test_pass_at_k_is_the_share_of_subsets_with_one_that_passes(passes: list[bool], k: int):
    if k > len(passes):
        assert math.isnan(one(passes, k))
        return
    subsets = [any(subset) for subset in itertools.combinations(passes, k)]
    assert one(passes, k) == pytest.approx(sum(subsets) / len(subsets), abs=1e-12)


@given(st.integers(1, 2000), st.data())
def test_pass_at_k_is_that_of_exact_combinatorics(n: int, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    found = pass_at_k(np.array([n]), np.array([c]), k)[0]
    assert found == pytest.approx(float(exact), abs=1e-9) and 0 <= found <= 1


@given(ROWS)
def test_pass_at_1_is_the_mean_and_pass_at_n_is_whether_any_passes(passes: list[bool]):
    assert one(passes, 1) == pytest.approx(np.mean(passes))
    assert one(passes, len(passes)) == float(any(passes))
    values = [one(passes, k) for k in range(1, len(passes) + 1)]
    assert values == sorted(values)


def test_pass_at_k_has_no_bias():
    """Its mean over all outcomes of n samples that pass with probability p is 1 - (1 - p)^k."""
    n, k, p = 6, 3, 0.3
    expected = sum(
        math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(np.array([n]), np.array([c]), k)[0]
        for c in range(n + 1)
    )
    assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


@given(
    st.lists(
        st.tuples(st.sampled_from(["1", " 1", "2", "3", None]), st.booleans(), st.booleans()),
        min_size=1,
        max_size=8,
    )
)
def test_the_majority_is_the_mean_over_the_answers_that_most_samples_have(rows):
    answers, passes, scored = (list(column) for column in zip(*rows, strict=True))
    found = majority_passes([answers], np.array([passes]), np.array([scored]))[0]
    voters = [(a.strip(), p) for a, p, s in rows if a is not None and s]
    counts = Counter(text for text, _ in voters)
    if not any(scored):
        assert math.isnan(found)
    elif not voters:
        assert found == 0
    else:
        # Whoever draws the answer among the most frequent ones, and one of the samples that gave it.
        tops = [text for text in counts if counts[text] == max(counts.values())]
        expected = np.mean([np.mean([p for text, p in voters if text == top]) for top in tops])
        assert found == pytest.approx(expected)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=30), st.integers(0, 3))
def test_the_interval_is_the_normal_one_over_problems_that_have_a_value(
    values: list[float], unknown: int
):
    found = Estimate.of(np.array([*values, *[np.nan] * unknown]))
    n, mean = len(values), math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    assert found.num_problems == n and found.value == pytest.approx(mean, abs=1e-12)
    if min(values) == max(values):
        assert math.isnan(found.half_width)
    else:
        expected = 1.96 * math.sqrt(squares / (n * (n - 1)))
        assert found.half_width == pytest.approx(expected, rel=1e-3, abs=1e-9)


def test_the_interval_holds_the_truth_as_often_as_it_says():
    """With several samples of each problem, which a normal interval over samples would be too sure of."""
    rng, held, naive = np.random.default_rng(0), 0, 0
    for _ in range(600):
        chances = rng.beta(0.5, 0.5, 80)  # of the problems: many are solved always or never
        rewards = rng.random((80, 16)) < chances[:, None]
        estimate = Estimate.of(rewards.mean(axis=1))
        held += abs(estimate.value - 0.5) <= estimate.half_width
        naive += abs(estimate.value - 0.5) <= NORMAL_95 * rewards.std(ddof=1) / math.sqrt(80 * 16)
    assert 0.93 <= held / 600 <= 0.97 and naive / 600 < 0.6


def test_of_too_few_problems_there_is_no_interval():
    assert Estimate.of(np.array([np.nan])).num_problems == 0
    single = Estimate.of(np.array([0.5]))
    assert single.value == 0.5 and math.isnan(single.half_width)
