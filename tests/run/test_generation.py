"""From an engine's stream to groups: each response is handed on when it ends, the others going on."""

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest
from fakes import made_up_latency
from hypothesis import given
from hypothesis import strategies as st
from rollouts import PROMPT, response

from pat_jax.common.errors import UserError
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.record.report import RolloutReport
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.engine.session import WINDOW
from pat_jax.layout.mesh import factored_mesh
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.planning.types import Split
from pat_jax.rl.batches.types import FinishReason, Prompt, RolloutGroup
from pat_jax.rl.data.arithmetic import TOKENIZER
from pat_jax.rl.rewards.responses import response_reader
from pat_jax.rl.rewards.scorer import RewardScorer
from pat_jax.run.generation import EVAL, Generator, full_load, sampling_request
from pat_jax.run.logging.rollout_metrics import describe_rollouts

SPLIT = Split(1, 1)
CONFIG = RolloutConfig(
    prompts_per_step=3, num_generations=2, max_prompt_length=96, max_completion_length=40
)
PROMPTS = [Prompt(7 + i, (i + 2,), f"p{i}", {}) for i in range(3)]

Stream = Callable[[Sequence[Request]], Iterator[tuple[int, Completion]]]

KNOCK = """
def knock(prompts, completions, **columns):
    if completions[0] == "early":
        with open({door!r}, "w") as file:  # waits until somebody listens
            file.write(",".join(completions))
    return [float(len(text)) for text in completions]
"""


class ScriptedEngine:
    """Yields what a script says; knows whether somebody takes it to its end."""

    def __init__(self, script: Stream, capacity: int = 6):
        self.script, self.capacity = script, capacity
        self.layouts = {SPLIT: "the layout"}
        self.layout = self.layouts[SPLIT]
        self.mesh = factored_mesh(jax.devices()[:1])
        self.is_released = False

    def stream(self, requests: Sequence[Request], *_: object, **__: object) -> Iterator:
        try:
            yield from self.script(requests)
        finally:
            self.is_released = True


def generator(engine: ScriptedEngine) -> Generator:
    lengths = LengthModel.empty(CONFIG.max_completion_length)
    no_trainer = cast(Any, None)
    return Generator(cast(Any, engine), no_trainer, FixedLayout(SPLIT), CONFIG, 0, lengths)


def notify(text: str, *, is_truncated: bool = False, error: str = "") -> Completion:
    tokens = np.array(TOKENIZER.encode(text) + [TOKENIZER.eos_ids[0]] * (not is_truncated))
    return Completion(tokens, np.zeros(len(tokens), np.float32), is_truncated, error=error)


@given(order=st.permutations(range(6)), is_cut=st.lists(st.booleans(), min_size=6, max_size=6))
def test_responses_are_handed_on_as_they_end_and_grouped_in_order(order, is_cut):
    output = [notify(str(i) * (i + 1), is_truncated=cut) for i, cut in enumerate(is_cut)]
    handed_on = {}

    def script(requests: Sequence[Request]) -> Iterator[tuple[int, Completion]]:
        assert [request.prompt_id for request in requests] == [7, 7, 8, 8, 9, 9]
        for count, i in enumerate(order):
            assert list(handed_on) == order[:count]
            yield i, output[i]

    groups, _ = generator(ScriptedEngine(script)).rollout(PROMPTS, 0, handed_on.__setitem__)
    assert [group.prompt for group in groups] == PROMPTS
    for i, done in enumerate(output):
        rollout = groups[i // 2].rollouts[i % 2]
        assert rollout is handed_on[i]
        assert (rollout.prompt, rollout.sample) == (PROMPTS[i // 2], i % 2)
        assert rollout.tokens is done.tokens and rollout.logprobs is done.logprobs
        assert rollout.finish == (FinishReason.LENGTH if is_cut[i] else FinishReason.STOP)


@pytest.mark.timeout(60)
def test_a_group_is_scored_before_the_rollout_ends(tmp_path: Path):
    door, function = tmp_path / "door", tmp_path / "knock_rewards.py"
    os.mkfifo(door)
    function.write_text(KNOCK.format(door=str(door)))

    def script(_: Sequence[Request]) -> Iterator[tuple[int, Completion]]:
        yield 3, notify("bird")
        yield 2, notify("early")
        assert door.read_text() == "early,bird"  # waits for the function: the rollout goes on after
        for i in (5, 0, 4, 1):
            yield i, notify("a" * i)

    with RewardScorer(f"{function}:knock", timeout=60.0) as scorer:
        texts = [prompt.text for prompt in PROMPTS for _ in range(2)]
        scoring = scorer.begin(texts, response_reader([], TOKENIZER))
        generator(ScriptedEngine(script)).rollout(PROMPTS, 0, scoring.add)
        assert scoring.rewards().tolist() == [0, 1, 5, 4, 4, 5]


def test_an_error_over_a_response_ends_the_rollout_at_once():
    def script(_: Sequence[Request]) -> Iterator[tuple[int, Completion]]:
        yield 1, notify("1")
        raise AssertionError("the rollout went on")

    def refuse(place: int, rollout: object) -> None:
        raise UserError(f"the reward is wrong, as {place} shows")

    engine = ScriptedEngine(script)
    with pytest.raises(UserError, match="as 1 shows"):
        generator(engine).rollout(PROMPTS, 0, refuse)
    assert engine.is_released


def test_responses_that_could_not_be_sampled_stop_the_run_after_the_others():
    heard = []

    def script(_: Sequence[Request]) -> Iterator[tuple[int, Completion]]:
        for i in (4, 5, 3, 0, 1, 2):
            yield i, notify("1", error=f"no logits in {i}" if i in (3, 5) else "")

    output = "2 of 6 responses could not be sampled: no logits in 3; go"
    with pytest.raises(UserError, match=output):
        generator(ScriptedEngine(script)).rollout(PROMPTS, 0, lambda i, _: heard.append(i))
    assert heard == [4, 0, 1, 2]


def test_an_evaluation_in_several_rollouts_numbers_its_requests_through():
    asked = []

    def script(requests: Sequence[Request]) -> Iterator[tuple[int, Completion]]:
        asked.append(len(requests))
        for i in reversed(range(len(requests))):
            yield i, notify("1" * requests[i].tokens[0])

    prompts = [Prompt(i, (i % 40 + 1,), "p", {}) for i in range(2 * WINDOW + 3)]
    requests = [sampling_request(CONFIG, one, (0, EVAL, 0, one.id, 0), 0.0) for one in prompts]
    heard = dict(generator(ScriptedEngine(script, capacity=2)).evaluate(requests))
    assert asked == [2 * WINDOW, 3]
    assert list(heard) == [*reversed(range(2 * WINDOW)), *reversed(range(2 * WINDOW, len(prompts)))]
    assert all(len(done.tokens) - 1 == i % 40 + 1 for i, done in heard.items())


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=30))
def test_lengths_are_those_of_all_responses_and_of_those_that_ended(output: list[tuple[int, bool]]):
    finish = {True: FinishReason.STOP, False: FinishReason.LENGTH}
    rollouts = [response([0] * length, finish=finish[has_ended]) for length, has_ended in output]
    report = RolloutReport(total_s=1.0)
    found = describe_rollouts([RolloutGroup(PROMPT, rollouts)], report)
    ended = [length for length, has_ended in output if has_ended]
    for name, lengths in {"length": [n for n, _ in output], "ended_length": ended}.items():
        own = {key for key in found if key.startswith(f"rollout/{name}_")}
        names = ("min", "mean", "p50", "p90", "p99", "max") if lengths else ()
        assert own == {f"rollout/{name}_{key}" for key in names}
        if lengths:
            assert found[f"rollout/{name}_mean"] == pytest.approx(statistics.fmean(lengths))
            assert found[f"rollout/{name}_p50"] == pytest.approx(statistics.median(lengths))
            assert found[f"rollout/{name}_min"] == min(lengths)
            assert found[f"rollout/{name}_max"] == max(lengths)
            largest = ("p50", "p90", "p99", "max")
            in_order = [float(found[f"rollout/{name}_{key}"]) for key in largest]
            assert in_order == sorted(in_order)
    assert found["rollout/truncated"] == pytest.approx(1 - len(ended) / len(output))


@pytest.mark.parametrize("samples, first", [(8, Split(1, 4)), (1, Split(4, 1))])
def test_a_rollout_begins_where_its_prompts_are_computed_once(samples: int, first: Split):
    """One group decodes faster, and needs four prefill calls where no prompt is shared."""
    latency = made_up_latency(
        {Split(4, 1): 0.2, Split(1, 4): 0.1},
        dict.fromkeys((Split(4, 1), Split(1, 4)), 0.0),
        reshard=1.0,
        migrate_per_token=0.0,
        prefill=20.0,
    )
    config = RolloutConfig(num_generations=samples, max_prompt_length=64, max_completion_length=64)
    planner = CostModelPlanner((Split(4, 1), Split(1, 4)), latency, LengthModel.empty(64))
    sequences = 4 * latency.prefill_blocks * latency.page_size // config.max_prompt_length
    assert planner.start(full_load(config, sequences)) == first
