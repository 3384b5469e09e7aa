"""Reward functions as TRL, verl and this project write them: what they are told, what they may return."""

import asyncio
import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pat_jax.common.errors import UserError
from pat_jax.rl.rewards.outcome import Cause, Failure, Outcome
from pat_jax.rl.rewards.responses import Response
from pat_jax.rl.rewards.signatures import Recognised

VERL: dict[str, object] = {
    "data_source": "openai/gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 5},
    "answer": "72.0",
    "finish_reason": "stop",
}


def group(*texts: str, columns: Mapping[str, object] = VERL) -> list[Response]:
    return [
        Response("p", text, columns, prompt_ids=(7, 8), completion_ids=[*map(ord, text), 1])
        for text in texts
    ]


def call(function: Callable[..., Any], responses: Sequence[Response]) -> Outcome:
    recognised = Recognised(function, "m:f")
    with contextlib.closing(recognised.loop):
        return recognised(responses)


# --- once a group --------------------------------------------------------------------------------


def test_a_group_function_is_told_lists():
    told = {}

    def reward(prompts, completions, **columns):
        told.update(columns, prompts=prompts, completions=completions)
        return [1, 2]

    assert call(reward, group("a", "b")) == Outcome(scores=[1.0, 2.0])
    wanted = {name: [value, value] for name, value in VERL.items()}
    assert told == wanted | {"prompts": ["p", "p"], "completions": ["a", "b"]}


def test_trl_functions_get_token_ids_and_nothing_that_they_do_not_name():
    def by_length(completion_ids, **kwargs):
        assert "prompt_ids" not in kwargs and kwargs["completions"] == ["a", "bcd"]
        return [float(len(ids)) for ids in completion_ids]

    def whole(prompts, completions, prompt_ids, completion_ids, answer):
        assert prompt_ids == [[7, 8], [7, 8]] and completion_ids[1] == [98, 99, 100, 1]
        assert isinstance(completion_ids[0], list) and answer == ["72.0", "72.0"]
        return [0.0, 1.0]

    async def awaited(completions):
        await asyncio.sleep(0)
        return [float(len(text)) for text in completions]

    assert call(by_length, group("a", "bcd")).scores == [2, 4]
    assert call(whole, group("a", "bcd")).scores == [0, 1]
    assert call(awaited, group("a", "bcd")).scores == [1, 3]


CHAT = ({"role": "user", "content": "What is 2 + 3?"},)


def chats(*texts: str) -> list[Response]:
    return [replace(one, messages=CHAT) for one in group(*texts)]


def by_content(completions, **kwargs):  # the conversational example of TRL's page on GRPO
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(pattern, content) else 0.0 for content in contents]


async def by_content_later(prompts, completions, **kwargs):
    await asyncio.sleep(0)
    assert prompts[0][-1]["content"] == "What is 2 + 3?"
    return by_content(completions)


def by_annotation(completions: list[list[dict[str, str]]], **kwargs):
    return [float(len(completion)) for completion in completions]


def by_text(prompts, completions, **kwargs):
    assert prompts == ["p", "p"]
    return [float(len(completion)) for completion in completions]


RIGHT = "<think>3</think><answer>5</answer>"


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (by_content, [0.0, 1.0]),
        (by_content_later, [0.0, 1.0]),
        (by_annotation, [1.0, 1.0]),
        (by_text, [0.0, float(len(RIGHT))]),
    ],
)
def test_chats_are_messages_for_functions_written_for_these(function, wanted: list[float]):
    """An empty response, too, tells the two apart."""
    recognised = Recognised(function, "m:f")
    with contextlib.closing(recognised.loop):
        for _ in range(2):
            assert recognised(chats("", RIGHT)) == Outcome(scores=wanted)


def test_a_function_that_fails_on_both_raises_what_it_raised_on_texts():
    def wrong(completions, **kwargs):
        return [kwargs["absent"]] if isinstance(completions[0], str) else [1 / 0]

    with pytest.raises(KeyError, match="absent"):
        call(wrong, chats("a"))


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (lambda completions, **_: [float(5 in text) for text in completions], TypeError),
        (lambda completions, **_: [float(text[0] == "<") for text in completions], IndexError),
    ],
)
def test_a_mistake_of_its_own_is_not_hidden_by_messages(function, error: type[Exception]):
    """Lists of messages raise neither: all rewards would be 0."""
    recognised = Recognised(function, "m:f")
    with contextlib.closing(recognised.loop):
        for _ in range(2):
            with pytest.raises(error):
                recognised(chats("", RIGHT))


def test_prompts_that_are_texts_stay_texts():
    with pytest.raises(TypeError, match="string indices"):
        call(by_content, group("a"))


def test_calls_share_an_event_loop():
    """A client of a service that a module keeps is bound to the loop of its first call."""
    loops = []

    async def reward(completions):
        loops.append(asyncio.get_running_loop())
        return [1.0]

    recognised = Recognised(reward, "m:f")
    assert [recognised(group("a")).scores for _ in range(2)] == [[1.0]] * 2
    assert loops[0] is loops[1]
    recognised.loop.close()


# --- once a response -----------------------------------------------------------------------------


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "openai/gsm8k" and extra_info == {"split": "train", "index": 5}
    return float(solution_str == ground_truth)


async def compute_score_async(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    return compute_score(data_source, solution_str, ground_truth, extra_info)


@pytest.mark.parametrize("function", [compute_score, compute_score_async])
def test_verls_function_is_told_a_response_and_its_row(function):
    assert call(function, group("72", "73", "72")) == Outcome([1.0, 0.0, 1.0], numbers=[{}] * 3)


def test_coroutines_of_a_group_wait_beside_each_other():
    """One after another they would wait for ever."""
    is_last = asyncio.Event()

    async def compute_score(solution_str, ground_truth):
        if solution_str == "last":
            is_last.set()
        await asyncio.wait_for(is_last.wait(), timeout=30)
        return len(solution_str)

    assert call(compute_score, group("a", "last")).scores == [1, 4]


def test_a_dict_is_a_score_and_numbers_beside_it():
    def compute_score(data_source, solution_str, ground_truth):
        if solution_str == "plain":
            return 0.5
        return {"score": 2, "acc": True, "size": np.float32(3), "pred": "x", "bad": float("inf")}

    outcome = call(compute_score, group("dict", "plain"))
    assert outcome.scores == [2, 0.5]
    assert outcome.numbers == [{"acc": 1.0, "size": 3.0}, {}]


def test_a_response_that_fails_costs_no_other_its_score():
    def compute_score(solution_str, ground_truth):
        if solution_str == "raise":
            raise KeyError(solution_str)
        return {"a": 1} if solution_str == "dict" else 1.0

    async def compute_score_async(solution_str, ground_truth):
        return compute_score(solution_str, ground_truth)

    for function in (compute_score, compute_score_async):
        fine, raised, odd = call(function, group("fine", "raise", "dict")).scores
        assert fine == 1
        assert isinstance(raised, Failure) and raised.cause is Cause.EXCEPTION
        assert "raised KeyError: 'raise'" in raised.text
        assert "raise KeyError(solution_str)" in raised.traceback
        assert "rewards/signatures.py" not in raised.traceback
        assert isinstance(odd, Failure) and odd.cause is Cause.NOT_A_NUMBER


@pytest.mark.parametrize(
    ("columns", "wanted"),
    [
        ({"reward_model": {"ground_truth": ["in", "verl"]}, "answer": "x"}, ["in", "verl"]),
        ({"reward_model": "a text", "ground_truth": 5, "answer": "5"}, 5),
        ({"answer": "72"}, "72"),
    ],
)
def test_the_ground_truth_is_the_rows(columns, wanted):
    told = []

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        told.append((data_source, ground_truth, extra_info))
        return 0

    call(compute_score, group("a", columns=columns))
    assert told == [(None, wanted, None)]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda solution_str, ground_truth: 1, "missing a required argument: 'ground_truth'"),
        (lambda solution_str, tokenizer: 1, "missing a required argument: 'tokenizer'"),
        (lambda completions, trainer_state: [1], "missing a required argument: 'trainer_state'"),
    ],
)
def test_an_argument_that_there_is_not_is_named(function, message):
    with pytest.raises(UserError, match=f"reward 'm:f' cannot be called .{message}.: expected"):
        call(function, group("a", columns={"finish_reason": "stop"}))


def test_functions_are_told_apart_by_their_parameters():
    class Judge:
        def __call__(self, data_source, solution_str, ground_truth, **kwargs):
            assert kwargs == {"extra_info": VERL["extra_info"]}
            return 1.0

    assert call(Judge(), group("a")).scores == [1.0]
    assert call(lambda completions: [2.0], group("a")).scores == [2.0]
    with pytest.raises(
        TypeError
    ):  # compiled code that does not say is given all: no such arguments
        call(max, group("a"))
