"""From the rewards of samples to the metrics of an evaluation, whole and by set."""

import json
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.rl.evaluation import (
    Estimate,
    Evaluated,
    describe_evaluation,
    majority_passes,
    pass_at_k,
    report,
)
from pat_jax.rl.rewards.outcome import Cause, Failure
from pat_jax.rl.rewards.weighted_sum import FunctionScores

NAN = np.nan
REWARDS = np.array([[1, 0, 1, 1], [0, 0, 0, 0.5], [NAN, 1, NAN, NAN], [NAN] * 4], np.float32)


def scores(name: str) -> FunctionScores:
    values = [Failure(Cause.NONE, "…") if np.isnan(x) else float(x) for x in REWARDS.reshape(-1)]
    return FunctionScores(f"m:{name}", name, 1.0, values, [{} for _ in values])


def evaluated(*functions: str) -> Evaluated:
    lengths = np.arange(16).reshape(4, 4)
    answers = [["3", "4", "3", None], [None] * 4, ["5", "6", "7", "7"], ["1"] * 4]
    parts = [scores(name) for name in functions or ("right",)]
    return Evaluated("all", REWARDS, lengths, lengths > 12, answers, parts)


def test_a_problem_counts_once_whatever_of_it_was_scored():
    one = evaluated()
    assert one.mean().value == pytest.approx((0.75 + 0.125 + 1) / 3)
    assert one.mean().num_problems == 3
    assert one.num_failed == 7
    # The third problem has one sample with a reward: enough for pass@1 alone.
    assert one.pass_at(1).value == pytest.approx((0.75 + 0 + 1) / 3)
    assert (one.pass_at(2).value, one.pass_at(2).num_problems) == (0.5, 2)
    majority = one.majority()
    assert majority is not None
    assert (majority.value, majority.num_problems) == (pytest.approx((1 + 0 + 1) / 3), 3)


def test_a_part_is_what_its_problems_alone_would_be():
    part = evaluated("right", "short").part("second", slice(1, 3))
    assert part.name == "second" and part.mean().value == pytest.approx((0.125 + 1) / 2)
    assert part.num_failed == 3 and part.answers == [[None] * 4, ["5", "6", "7", "7"]]
    assert part.lengths.tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert [x for x in part.functions[1].scores if isinstance(x, float)] == [0, 0, 0, 0.5, 1]


def test_metrics_are_of_all_and_of_several_sets_each_its_own():
    one = evaluated("right", "short")
    parts = [one.part("a", slice(0, 2)), one.part("b-1", slice(2, 4))]
    found = describe_evaluation(one, parts)
    assert found["eval/reward"] == one.mean().value and found["eval/failed"] == 7
    assert found["eval/reward/right"] == found["eval/reward/short"] == pytest.approx(4.5 / 9)
    assert found["eval/a/reward"] == pytest.approx((0.75 + 0.125) / 2)
    assert found["eval/b-1/reward"] == 1 and "eval/b-1/reward_ci95" not in found
    assert found["eval/reward_ci95"] == one.mean().half_width > 0
    assert found["eval/a/pass@4"] == found["eval/pass@4"] == 0.5
    assert found["eval/truncated"] == 3 / 16 and found["eval/length_mean"] == 7.5
    alone = describe_evaluation(one, parts[:1])
    assert not [name for name in alone if name.startswith("eval/a/")]


def test_of_one_sample_there_is_neither_pass_at_k_nor_a_majority():
    one = evaluated()
    rewards, lengths, is_cut = (x[:, 1:2] for x in (one.rewards, one.lengths, one.is_cut))
    answers = [row[1:2] for row in one.answers]
    single = Evaluated("all", rewards, lengths, is_cut, answers, ())
    found = describe_evaluation(single, [single])
    assert found["eval/reward"] == pytest.approx(1 / 3)
    assert not [name for name in found if "@" in name]


def test_a_report_is_json_without_nan():
    one = evaluated("right", "short")
    content = json.loads(json.dumps(report(one, [1, 2, 4]), allow_nan=False))
    mean = content["mean"]
    assert mean["low"] < mean["value"] == one.mean().value < mean["high"]
    assert mean["high"] - mean["low"] == pytest.approx(2 * one.mean().half_width)
    assert set(content["pass"]) == {"1", "2", "4"} and content["failed"] == 7
    assert content["pass"]["4"] == {"value": 0.5, "low": pytest.approx(-0.48, abs=0.01)} | {
        "high": pytest.approx(1.48, abs=0.01),
        "problems": 2,
    }
    nothing = report(one.part("none", slice(3, 4)), [1])
    assert json.loads(json.dumps(nothing, allow_nan=False))["mean"]["value"] is None


# --- pass@k, maj@k and intervals against brute force: every subset, every order ---------------------


@given(st.integers(1, 2000), st.data())
def test_pass_at_k_is_that_of_exact_combinatorics(n: int, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    found = pass_at_k(n, c, k)
    assert found == pytest.approx(float(exact), abs=1e-9) and 0 <= found <= 1


@given(
    st.lists(
        st.tuples(st.sampled_from(["1", " 1", "2", "3", None]), st.booleans(), st.booleans()),
        min_size=1,
        max_size=8,
    )
)
def test_the_majority_is_the_mean_over_the_answers_that_most_samples_have(rows):
    answers, passes, scored = (list(column) for column in zip(*rows, strict=True))
    found = majority_passes(answers, passes, scored)
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
def test_the_interval_is_the_normal_one_over_problems_that_have_a_value(values, unknown):
    found = Estimate.of(np.array([*values, *[np.nan] * unknown]))
    n, mean = len(values), math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    assert found.num_problems == n and found.value == pytest.approx(mean, abs=1e-12)
    if min(values) == max(values):
        assert math.isnan(found.half_width)
    else:
        expected = 1.96 * math.sqrt(squares / (n * (n - 1)))
        assert found.half_width == pytest.approx(expected, rel=1e-3, abs=1e-9)


def test_of_too_few_problems_there_is_no_interval():
    assert Estimate.of(np.array([np.nan])).num_problems == 0
    single = Estimate.of(np.array([0.5]))
    assert single.value == 0.5 and math.isnan(single.half_width)
