"""Responses that several functions score at once: weights, functions that fail, that do not apply."""

import os
from pathlib import Path

import numpy as np
import pytest
from processes import children_of

from pat_jax.common.errors import UserError
from pat_jax.rl.batches.types import Prompt
from pat_jax.rl.rewards.responses import trial_responses
from pat_jax.rl.rewards.rewards import short_names
from pat_jax.rl.rewards.scorer import RewardScorer

FUNCTIONS = """
def length(completions):
    return [float(len(text)) for text in completions]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "seen": 1}

def digits_only(completions):
    return [float(text) if text.isdigit() else None for text in completions]

def fail_on_a(completions):
    assert "a" not in completions
    return [1.0] * len(completions)

def fail_on_b(completions):
    assert "b" not in completions
    return [1.0] * len(completions)
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def specs(path: Path, *names: str) -> list[str]:
    return [f"{path}:{name}" for name in names]


def test_functions_of_every_kind_add_up_with_their_weights(path):
    names = [*specs(path, "length", "compute_score", "digits_only"), "exact"]
    columns = {"answer": ["12", "12", "#12"], "finish_reason": ["stop"] * 3}
    with RewardScorer(*names, weights=[0.5, 10.0, -1.0, 100.0], timeout=30.0) as scorer:
        scores = scorer.score(["p", "p", "q"], ["12", "xyz", "##12"], columns)
    # 0.5 x length + 10 x right - the number, if it is one + 100 x exact
    assert scores.tolist() == [0.5 * 2 + 10 - 12, 1.5, 2]


def test_a_function_of_weight_zero_is_measured_only(path, caplog):
    with RewardScorer(
        *specs(path, "fail_on_a", "length"), weights=[0.0, 2.0], timeout=30.0
    ) as scorer:
        assert scorer.score(["p", "q"], ["a", "bb"], {}).tolist() == [2, 4]
    assert "raised AssertionError; it has weight 0: completion 'a'" in caplog.text
    assert "left out" not in caplog.text


def test_where_no_function_applies_there_is_no_reward(path, caplog):
    names = specs(path, "digits_only", "digits_only")
    with RewardScorer(*names, timeout=30.0) as scorer:
        np.testing.assert_array_equal(scorer.score(["p", "q"], ["7", "x"], {}), [14, np.nan])
        assert len(caplog.records) == 2 and "'x'" in caplog.text
    with RewardScorer(*names, timeout=30.0) as scorer:
        message = (
            "none of 2 responses has a reward .2 none.; the first time reward .* returned None"
        )
        with pytest.raises(UserError, match=message):
            scorer.score(["p", "q"], ["x", "y"], {})


def test_functions_that_fail_in_turn_leave_nothing(path):
    with RewardScorer(*specs(path, "fail_on_a", "fail_on_b"), timeout=30.0) as scorer:
        message = "none of 2 responses has a reward .2 exception.*fail_on_a' raised AssertionError"
        with pytest.raises(UserError, match=message):
            scorer.score(["p", "q"], ["a", "b"], {})
        assert scorer.score(["r"], ["c"], {}).tolist() == [2]


def test_what_does_not_apply_to_made_up_responses_is_no_complaint(path):
    made_up = trial_responses(Prompt(0, (1,), "p", {}), [])
    with RewardScorer(*specs(path, "digits_only", "length"), timeout=30.0) as scorer:
        assert scorer.try_out(made_up, 2) == []
    with RewardScorer(*specs(path, "digits_only"), timeout=30.0) as scorer:
        (note,) = scorer.try_out(made_up, 2)
        assert "returned None when it was tried out" in note


def test_the_processes_of_the_others_end_where_one_is_not_there(path):
    before = children_of(os.getpid())
    with pytest.raises(UserError, match="has no function 'nothing'"):
        RewardScorer(*specs(path, "length", "nothing"), timeout=30.0)
    assert children_of(os.getpid()) == before


def test_names_in_metrics_are_short_and_differ():
    names = ["math", "mine.rewards:score", "a/b.py:score", "other:score_2", "math", "m:größe"]
    assert short_names(names) == ["math", "score", "score_2", "score_2_2", "math_2", "gr__e"]
    addresses = [
        "http://a:8000/v1/judge",
        "https://b/judge/?key=1",
        "http://host:80",
        "HTTP://[::1]/#x",
    ]
    assert short_names(addresses) == ["judge", "judge_2", "host_80", "___1_"]
