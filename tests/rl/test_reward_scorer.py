"""Responses that end one after the other: scored at once, whatever the order, and cleaned up after."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import children_of

from pat_jax.common.errors import UserError
from pat_jax.rl.batches.types import Prompt
from pat_jax.rl.rewards.responses import Response, trial_responses
from pat_jax.rl.rewards.rewards import short_names
from pat_jax.rl.rewards.scorer import RewardScorer

FUNCTIONS = """
import signal

def compare(prompts, completions, **columns):
    if "raise" in completions:
        raise KeyError("raise")
    longest = max(map(len, completions))
    return [len(text) / longest + place / 10 for place, text in enumerate(completions)]

def knock(prompts, completions, door, **columns):
    with open(door[0], "w") as file:  # waits until somebody listens
        file.write(completions[0])
    if completions[0] != "fine":
        signal.pause()
    return [1.0]

def length(completions):
    return [float(len(text)) for text in completions]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "seen": 1}

def digits_only(completions):
    return [float(text) if text.isdigit() else None for text in completions]

def fail_on_a(completions):
    assert "a" not in completions
    return [1.0] * len(completions)
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "functions.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def door(tmp_path: Path) -> Path:
    """Reading it waits until a reward function has written to it."""
    os.mkfifo(tmp_path / "door")
    return tmp_path / "door"


@pytest.fixture(scope="module")
def compare(functions: Path) -> Iterator[RewardScorer]:
    with RewardScorer(f"{functions}:compare", timeout=60.0) as scorer:
        scorer.score(["p"], ["a"], {})  # from now on it may raise for all
        yield scorer


def same(response: Response) -> Response:
    return response


def reference(groups: list[list[str]]) -> np.ndarray:
    """Group by group and, where that raises, one by one."""
    space: dict[str, Any] = {}
    exec(FUNCTIONS, space)
    rewards = []
    for texts in groups:
        for part in [[text] for text in texts] if "raise" in texts else [texts]:
            rewards += [np.nan] if part == ["raise"] else space["compare"]([], part)
    return np.array(rewards, np.float32)


@given(
    groups=st.lists(
        st.lists(st.sampled_from(["a", "bb", "ccc", "raise"]), min_size=1, max_size=4), max_size=4
    ),
    data=st.data(),
)
def test_the_order_in_which_responses_end_changes_nothing(compare, groups, data):
    responses = [Response(str(g), text, {}) for g, texts in enumerate(groups) for text in texts]
    prompts = [response.prompt for response in responses]
    scoring = compare.begin(prompts, same)
    for row in data.draw(st.permutations(range(len(responses)))):
        scoring.add(row, responses[row])
    rewards = scoring.rewards()
    np.testing.assert_array_equal(rewards, reference(groups), strict=True)
    at_once = compare.score(prompts, [response.completion for response in responses], {})
    assert rewards.tobytes() == at_once.tobytes()


@pytest.mark.timeout(60)
def test_a_response_is_scored_before_the_others_have_ended(functions, door):
    with RewardScorer(f"{functions}:knock", timeout=60.0) as scorer:
        scoring = scorer.begin(["p", "q"], same)
        for row in (1, 0):
            scoring.add(row, Response("pq"[row], "fine", {"door": str(door)}))
            assert door.read_text() == "fine"
        assert scoring.rewards().tolist() == [1, 1]
        assert scoring.hidden_seconds > 0


def test_equal_prompts_that_are_no_neighbours_are_two_groups(compare):
    scoring = compare.begin(["p", "q", "p"], same)
    for row, prompt in ((2, "p"), (0, "p"), (1, "q")):
        scoring.add(row, Response(prompt, "a" * (row + 1), {}))
    assert scoring.rewards().tolist() == [1, 1, 1]


def test_what_is_wrong_for_all_responses_is_said_at_the_next_one():
    with RewardScorer("exact", timeout=1.0) as scorer:
        scoring = scorer.begin(["p"] * 3, same)
        scoring.add(0, Response("p", "#1", {"answer": "1"}))
        scorer.thread.submit(int).result()  # what was given to the thread before is done
        with pytest.raises(UserError, match="needs the column 'finish_reason'"):
            scoring.add(1, Response("p", "#1", {"answer": "1"}))


def test_text_that_cannot_be_made_is_an_error():
    def read(number: int) -> Response:
        raise ValueError(f"no text of {number}")

    with RewardScorer("exact", timeout=1.0) as scorer:
        scoring = scorer.begin(["p"], read)
        scoring.add(0, 5)
        with pytest.raises(ValueError, match="no text of 5"):
            scoring.rewards()


@pytest.mark.timeout(60)
def test_nothing_is_left_of_a_rollout_that_breaks_off(functions, door):
    threads, children = set(threading.enumerate()), children_of(os.getpid())
    scorer = RewardScorer(f"{functions}:knock", timeout=1000.0)
    with pytest.raises(RuntimeError, match="the engine broke"), scorer:
        scoring = scorer.begin([str(row) for row in range(100)], same)
        scoring.add(0, Response("0", "hang", {"door": str(door)}))
        assert door.read_text() == "hang"
        for row in range(1, 100):  # more than the pipe to the workers holds
            scoring.add(row, Response(str(row), "x" * 10_000, {"door": str(door)}))
        assert children_of(os.getpid()) > children
        raise RuntimeError("the engine broke")
    assert children_of(os.getpid()) == children
    assert set(threading.enumerate()) <= threads


def test_a_scorer_that_is_closed_in_the_middle_is_silent(caplog):
    """As where a run is stopped: closing meets a response that is just being read."""
    is_reading, may_go_on = threading.Event(), threading.Event()

    def read(response: Response) -> Response:
        is_reading.set()
        may_go_on.wait(60)
        return response

    scorer = RewardScorer("exact", timeout=1.0)
    scoring = scorer.begin(["p"], read)
    scoring.add(0, Response("p", "#1", {"answer": "1", "finish_reason": "stop"}))
    is_reading.wait(60)
    closing = threading.Thread(target=scorer.close)
    closing.start()
    with pytest.raises(RuntimeError, match="after shutdown"):
        while True:
            scorer.thread.submit(int)
    may_go_on.set()
    closing.join()
    assert not caplog.records
    with pytest.raises(RuntimeError, match="after shutdown"):
        scoring.rewards()


# --- several functions at once: weights, functions that fail, that do not apply ---------------------


def specs(path: Path, *names: str) -> list[str]:
    return [f"{path}:{name}" for name in names]


def test_functions_of_every_kind_add_up_with_their_weights(functions):
    names = [*specs(functions, "length", "compute_score", "digits_only"), "exact"]
    columns = {"answer": ["12", "12", "#12"], "finish_reason": ["stop"] * 3}
    with RewardScorer(*names, weights=[0.5, 10.0, -1.0, 100.0], timeout=30.0) as scorer:
        scores = scorer.score(["p", "p", "q"], ["12", "xyz", "##12"], columns)
    # 0.5 x length + 10 x right - the number, if it is one + 100 x exact
    assert scores.tolist() == [0.5 * 2 + 10 - 12, 1.5, 2]


def test_a_function_of_weight_zero_is_measured_only(functions, caplog):
    with RewardScorer(
        *specs(functions, "fail_on_a", "length"), weights=[0.0, 2.0], timeout=30.0
    ) as scorer:
        assert scorer.score(["p", "q"], ["a", "bb"], {}).tolist() == [2, 4]
    assert "raised AssertionError; it has weight 0: completion 'a'" in caplog.text
    assert "left out" not in caplog.text


def test_where_no_function_applies_there_is_no_reward(functions, caplog):
    names = specs(functions, "digits_only", "digits_only")
    with RewardScorer(*names, timeout=30.0) as scorer:
        np.testing.assert_array_equal(scorer.score(["p", "q"], ["7", "x"], {}), [14, np.nan])
        assert len(caplog.records) == 2 and "'x'" in caplog.text
    with RewardScorer(*names, timeout=30.0) as scorer:
        message = (
            "none of 2 responses has a reward .2 none.; the first time reward .* returned None"
        )
        with pytest.raises(UserError, match=message):
            scorer.score(["p", "q"], ["x", "y"], {})


def test_what_does_not_apply_to_made_up_responses_is_no_complaint(functions):
    made_up = trial_responses(Prompt(0, (1,), "p", {}), [])
    with RewardScorer(*specs(functions, "digits_only", "length"), timeout=30.0) as scorer:
        assert scorer.try_out(made_up, 2) == []
    with RewardScorer(*specs(functions, "digits_only"), timeout=30.0) as scorer:
        (note,) = scorer.try_out(made_up, 2)
        assert "returned None when it was tried out" in note


def test_the_processes_of_the_others_end_where_one_is_not_there(functions):
    before = children_of(os.getpid())
    with pytest.raises(UserError, match="has no function 'nothing'"):
        RewardScorer(*specs(functions, "length", "nothing"), timeout=30.0)
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
    models = ["model:rewards/judge@main", "exact", "model:b/judge/", "model:./my model"]
    assert short_names(models) == ["judge", "exact", "judge_2", "my_model"]
