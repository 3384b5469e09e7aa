"""What the policy says: every response in the file, and samples that a person can read."""

from pathlib import Path

import numpy as np
import pytest
from runs import json_lines

from pat_jax.common.errors import UserError
from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout
from pat_jax.rl.data.arithmetic import TOKENIZER
from pat_jax.rl.rewards.outcome import Cause, Failure
from pat_jax.rl.rewards.weighted_sum import FunctionScores
from pat_jax.run.logging.completions import WIDTH, Completions, Heard


def rollout(text: str, finish: FinishReason = FinishReason.LENGTH) -> Rollout:
    prompt = Prompt(3, tuple(TOKENIZER.encode("1+2=")), "1+2=", {})
    tokens = TOKENIZER.encode(text) + [*TOKENIZER.eos_ids] * (finish is FinishReason.STOP)
    logprobs = np.zeros(len(tokens), np.float32)
    return Rollout(prompt, 0, np.array(tokens, np.int32), logprobs, finish)


def test_every_response_is_a_line_with_its_reward(tmp_path: Path):
    said = [rollout("3", FinishReason.STOP), rollout("12")]
    with Completions(TOKENIZER, tmp_path, is_asked=True) as completions:
        completions.write(1, "train", said, np.array([1.0, np.nan], np.float32))
        completions.write(2, "eval", said[:1], np.array([0.5], np.float32))
    lines = json_lines(tmp_path / "completions.jsonl")
    assert [line["reward"] for line in lines] == [1.0, None, 0.5]
    assert [(line["step"], line["kind"]) for line in lines] == [(1, "train")] * 2 + [(2, "eval")]
    assert [line["completion"] for line in lines] == ["3", "12", "3"]
    assert [(line["tokens"], line["finish"]) for line in lines[:2]] == [(2, "stop"), (2, "length")]
    assert {line["prompt"] for line in lines} == {"1+2="}


def test_what_each_of_several_functions_gave_is_written_beside_the_reward(tmp_path: Path):
    none = Failure(Cause.NONE, "returned None")
    one = FunctionScores("m:right", "right", 1.0, [1.0, none], [{}, {}])
    two = FunctionScores("m:short", "short", 0.5, [0.25, 2.0], [{}, {}])
    said, rewards = [rollout("3"), rollout("12")], np.array([1.125, 1.0], np.float32)
    with Completions(TOKENIZER, tmp_path, is_asked=True) as completions:
        completions.write(1, "train", said, rewards, [one, two])
        completions.write(1, "train", said, one.array, [one])
    lines = json_lines(tmp_path / "completions.jsonl")
    assert [line["reward"] for line in lines] == [1.125, 1.0, 1.0, None]
    by_function = [{"right": 1.0, "short": 0.25}, {"right": None, "short": 2.0}]
    assert [line["rewards"] for line in lines[:2]] == by_function
    assert "rewards" not in lines[2] | lines[3]


@pytest.mark.parametrize("is_asked", [True, False])
def test_responses_are_kept_where_their_rewards_end_the_run(tmp_path: Path, is_asked: bool):
    with Completions(TOKENIZER, tmp_path, is_asked=is_asked) as completions:
        with completions.kept(1, "train", [rollout("1")]):
            pass
        said = r"the judge is down\. The responses are kept in .*jsonl"
        two = [rollout("3"), rollout("12")]
        with pytest.raises(UserError, match=said), completions.kept(2, "train", two):
            raise UserError("the judge is down.")
    lines = json_lines(tmp_path / "completions.jsonl")
    kept = [(line["step"], line["completion"], line["reward"]) for line in lines]
    assert kept == [(2, "3", None), (2, "12", None)]


def test_nobody_asked_and_nothing_is_written(tmp_path: Path):
    completions = Completions(TOKENIZER, tmp_path, is_asked=False)
    completions.write(1, "train", [rollout("3")], np.zeros(1, np.float32))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("count", [0, 1, 5])
def test_samples_fit_a_terminal_of_100_columns(tmp_path: Path, count: int):
    said = [rollout("7" * 500), rollout("3", FinishReason.STOP)]
    rewards = np.array([np.nan, 1.0], np.float32)
    completions = Completions(TOKENIZER, tmp_path, is_asked=False)
    lines = list(completions.samples(said, rewards, count))
    assert len(lines) == 3 * min(count, 2)
    assert all(len(line) <= 12 + WIDTH <= 100 and "\n" not in line for line in lines)
    if count:
        assert lines[0] == "  prompt    1+2="
        assert lines[2].strip() == "no reward, 500 tokens, length"
    if count > 1:
        assert lines[4:] == ["  response  3", "            reward 1, 2 tokens, stop"]


def test_responses_are_heard_in_order_whenever_they_end():
    passed: list[int] = []
    heard = Heard(lambda i, _: passed.append(i))
    one, two = rollout("1"), rollout("2")
    heard.add(1, two)
    heard.add(0, one)
    assert passed == [1, 0] and heard.rollouts == [one, two]
