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
from pat_jax.rl.rewards.responses import Response
from pat_jax.rl.rewards.scorer import RewardScorer

FUNCTIONS = """
import signal

def compare(prompts, completions, **columns):
    if "raise" in completions:
        raise KeyError("raise")
    longest = max(map(len, completions))
    return [len(text) / longest + place / 10 for place, text in enumerate(completions)]

def knock(prompts, completions, door, **columns):
    if completions[0] != "silent":
        with open(door[0], "w") as file:  # waits until somebody listens
            file.write(completions[0])
    if completions[0] != "fine":
        signal.pause()
    return [1.0]
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
