"""Several rewards of one response, added up with their weights."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.rl.rewards.outcome import Cause, Failure
from pat_jax.rl.rewards.weighted_sum import FunctionScores, weighted_sum

FAILURES = {cause: Failure(cause, f"failed by {cause}") for cause in Cause}
SCORES = st.one_of(
    st.floats(-100, 100),
    st.just(FAILURES[Cause.NONE]),
    st.sampled_from([FAILURES[cause] for cause in Cause if cause is not Cause.NONE]),
)


WEIGHTS = st.lists(st.sampled_from([1.0, 0.0, -0.5, 3.25, 1e-3]), min_size=1, max_size=4).filter(
    any
)


def functions(weights: list[float], rows: list[list[float | Failure]]) -> list[FunctionScores]:
    return [
        FunctionScores(f"m:f{i}", f"f{i}", weight, [row[i] for row in rows], [{}] * len(rows))
        for i, weight in enumerate(weights)
    ]


def reference(weights: list[float], scores: list[float | Failure]) -> float | str | None:
    """The rule in words: a failure, then nothing that applies, then the sum. One response."""
    total, applies = 0.0, False
    for weight, score in zip(weights, scores, strict=True):
        if weight == 0:
            continue
        if isinstance(score, Failure) and score.cause is not Cause.NONE:
            return "failed"
    for weight, score in zip(weights, scores, strict=True):
        if weight != 0 and isinstance(score, float):
            applies, total = True, total + weight * score
    return total if applies else None


@given(weights=WEIGHTS, data=st.data())
def test_the_reward_is_the_weighted_sum_of_what_applies(weights: list[float], data: st.DataObject):
    row = st.lists(SCORES, min_size=len(weights), max_size=len(weights))
    rows = data.draw(st.lists(row, max_size=6))
    rewards, failures = weighted_sum(functions(weights, rows))
    assert rewards.dtype == np.float32 and rewards.shape == (len(rows),)
    for row, scores in enumerate(rows):
        wanted = reference(weights, scores)
        if isinstance(wanted, float):
            np.testing.assert_allclose(rewards[row], wanted, rtol=1e-6, atol=1e-5)
            assert row not in failures
            continue
        assert math.isnan(rewards[row])
        assert (failures[row].cause is Cause.NONE) == (wanted is None)
        assert any(score is failures[row] for score in scores)


@given(st.lists(SCORES, max_size=6))
def test_the_reward_of_one_function_is_its_score(scores: list[float | Failure]):
    rewards, failures = weighted_sum(functions([1.0], [[score] for score in scores]))
    for row, score in enumerate(scores):
        if isinstance(score, Failure):
            assert failures[row] is score
        else:
            assert rewards[row] == np.float32(score)  # to the bit, but for -0.0


def test_a_sum_that_is_too_large_is_no_reward():
    rewards, failures = weighted_sum(functions([1e6], [[1e38], [1.0]]))
    np.testing.assert_array_equal(rewards, np.array([np.nan, 1e6], np.float32))
    assert failures.keys() == {0} and failures[0].cause is Cause.NOT_A_NUMBER
    assert "comes to 1e+44 with its weight, more than float32 holds" in failures[0].text
