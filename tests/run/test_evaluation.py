"""An evaluation from sets of prompts to its result, whatever answers and in whatever order."""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from runs import json_lines

from pat_jax.config.command_line import parse
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.rl.batches.types import Prompt
from pat_jax.rl.data.arithmetic import TOKENIZER
from pat_jax.rl.rewards.responses import response_reader
from pat_jax.rl.rewards.scorer import RewardScorer
from pat_jax.run.evaluation import Evaluation, Evaluator
from pat_jax.run.heldout import HeldoutSet
from pat_jax.run.logging.completions import Completions
from pat_jax.run.logging.progress import Progress


def prompts(*answers: str) -> list[Prompt]:
    return [
        Prompt(i, tuple(TOKENIZER.encode(f"{i}=")), f"{i}=", {"answer": answer})
        for i, answer in enumerate(answers)
    ]


SETS = [HeldoutSet("one", prompts("1", "2")), HeldoutSet("two", prompts("3", "4", "5"))]
# By problem and sample: right once of three, never, always, …
SAID = [["#1", "#2", "#3"], ["#9"] * 3, ["#3"] * 3, ["#4", "#4", "7"], ["#8", "#8", "#5"]]
OPTIONS = "--eval.num_generations 3 --eval.temperature 0.5 --eval.num_completions_to_print 2"


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory) -> tuple[Evaluation, list[Request], list[dict]]:
    asked: list[Request] = []

    def ask(requests: Sequence[Request]) -> Iterator[tuple[int, Completion]]:
        asked.extend(requests)
        for i in reversed(range(len(requests))):
            tokens = [*TOKENIZER.encode(SAID[i // 3][i % 3]), *TOKENIZER.eos_ids]
            logprobs = np.zeros(len(tokens), np.float32)
            yield i, Completion(np.array(tokens, np.int32), logprobs, is_truncated=False)

    folder: Path = tmp_path_factory.mktemp("evaluation")
    config = parse(["--preset", "demo", *OPTIONS.split()])
    read = response_reader(["answer"], TOKENIZER)
    with (
        RewardScorer("exact", timeout=30.0) as scorer,
        Completions(TOKENIZER, folder, is_asked=True) as completions,
    ):
        progress = Progress(1, stream=io.StringIO())
        found = Evaluator(config, SETS, read, scorer, completions, progress).evaluate(4, ask)
    return found, asked, json_lines(folder / "completions.jsonl")


def test_every_sample_is_asked_with_a_key_of_its_own(evaluated):
    _, asked, _ = evaluated
    assert len(asked) == 15 and len({tuple(request.key.tolist()) for request in asked}) == 15
    assert {request.sampling.temperature for request in asked} == {0.5}
    assert {request.prompt_id for request in asked} == {None}
    own = [prompt.tokens for one in SETS for prompt in one.prompts for _ in range(3)]
    assert [request.tokens for request in asked] == own


def test_rewards_belong_to_their_samples_and_problems_to_their_sets(evaluated):
    found, _, _ = evaluated
    rewards = [[1, 0, 0], [0, 0, 0], [1, 1, 1], [1, 1, 0], [0, 0, 1]]
    assert found.total.rewards.tolist() == rewards
    assert [part.rewards.tolist() for part in found.parts] == [rewards[:2], rewards[2:]]
    assert found.metrics["eval/one/reward"] == pytest.approx(1 / 6)
    assert found.metrics["eval/two/pass@3"] == 1 and found.metrics["eval/pass@3"] == 0.8
    assert found.metrics["eval/seconds"] == found.seconds > 0
    assert found.lines == [
        "held-out reward 0.467, pass@3 0.800 (5 prompts)",
        "held-out reward on one 0.167, pass@3 0.500 (2 prompts)",
        "held-out reward on two 0.667, pass@3 1.000 (3 prompts)",
    ]


def test_every_sample_is_a_line_and_a_few_are_shown(evaluated):
    found, _, lines = evaluated
    places = [(line["data"], line["id"], line["sample"]) for line in lines]
    assert places == [(s.name, p.id, i) for s in SETS for p in s.prompts for i in range(3)]
    assert [line["completion"] for line in lines] == [text for row in SAID for text in row]
    assert {(line["step"], line["kind"]) for line in lines} == {(4, "eval")}
    shown = [line for line in found.samples if line.startswith("  response")]
    assert shown == ["  response  #1", "  response  #9"]  # the first of each problem
