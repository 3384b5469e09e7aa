"""Dynamic sampling: what is kept, what is drawn instead, and where it ends; columns that are predicted meanwhile."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rollouts
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouts import group_of

from pat_jax.common.stopwatch import Stopwatch
from pat_jax.config.learning import AlgorithmConfig
from pat_jax.config.rollout import RolloutConfig
from pat_jax.config.run import RunConfig
from pat_jax.engine.record.report import RolloutReport
from pat_jax.rl.batches.types import Prompt, Rollout
from pat_jax.rl.data.arithmetic import TOKENIZER
from pat_jax.rl.data.epochs import Cursor
from pat_jax.rl.rewards.scorer import RewardScorer
from pat_jax.run import collect
from pat_jax.run.checkpoints.journal import RolloutJournal
from pat_jax.run.collect import Collector
from pat_jax.run.logging.completions import Completions
from pat_jax.run.logging.progress import Progress
from pat_jax.run.reads import Columns, ReadingThread, ReadsAsTheyEnd
from pat_jax.run.start.task import Task
from pat_jax.run.start.totals import Totals

WANTED, SAMPLES = 3, 2


class Sampler:
    """Stands for the generator: one of the responses to prompt i is wrong where `teaches[i]`."""

    def __init__(self, teaches: list[bool]):
        self.teaches, self.iterations = teaches, []

    policy, lengths = 1, None

    def rollout(self, prompts, iteration, on_finish, kept):
        del kept
        self.iterations.append(iteration)
        groups, report = [], RolloutReport()
        for i, prompt in enumerate(prompts):
            answers = "10" if self.teaches[prompt.id] else "11"
            texts = [[*TOKENIZER.encode(f"#{x}"), *TOKENIZER.eos_ids] for x in answers]
            groups.append(group_of(texts, prompt))
            for s, rollout in enumerate(groups[-1].rollouts):
                on_finish(i * SAMPLES + s, rollout)
        report.total_s = 1.0
        return groups, report


class Endless:
    """Prompts that are counted, four batches of which are called an epoch."""

    num_different, checksum = None, 0

    def draw(self, at: Cursor, size: int) -> tuple[list[Prompt], Cursor]:
        ids = range(at.offset, at.offset + size)
        prompts = [Prompt(i, (1,), f"prompt {i}", {"answer": "1"}) for i in ids]
        return prompts, Cursor(0, at.offset + size)

    def epochs(self, at: Cursor) -> float:
        return at.offset / (4 * WANTED)


def collected(teaches: list[bool], most: int, first: int = 0, reads: Any = None):
    endless: Any = Endless()
    task = Task(TOKENIZER, ["exact"], endless, [], None, ["answer"])
    sampler: Any = Sampler(teaches)
    with RewardScorer("exact", timeout=1.0) as scorer:
        collector = Collector(
            RolloutConfig(prompts_per_step=WANTED, num_generations=SAMPLES),
            task,
            scorer,
            Completions(TOKENIZER, Path(), is_asked=False),
            Progress(1),
            RolloutJournal(Path(), Path(), is_on=False),
            Totals(first, 1000, Cursor(0, first * WANTED)),
            lambda: reads or ReadsAsTheyEnd(),
            num_redraws=most,
        )
        found = collector.collect(0, sampler, Stopwatch())
    return found, collector.totals.batches, sampler.iterations


@given(st.lists(st.booleans(), min_size=15, max_size=15), st.integers(1, 4))
def test_groups_without_signal_are_replaced_in_order_by_as_few_batches_as_do(teaches, most):
    found, drawn, iterations = collected(teaches, most)
    seen = [i for i in range(WANTED * (1 + most)) if teaches[i]]
    enough = [n for n in range(1, 2 + most) if sum(teaches[: n * WANTED]) >= WANTED]
    assert drawn == (enough[0] if enough else 1 + most) == found.measured["rollout/batches"]
    assert iterations == list(range(drawn))  # other draws for a prompt that comes again
    ids = [group.prompt.id for group in found.scored.groups]
    if seen:
        assert ids == seen[:WANTED]
        np.testing.assert_array_equal(found.scored.rewards, [[1, 0]] * len(ids))
    else:  # a batch as it is
        assert ids == list(range(most * WANTED, (most + 1) * WANTED))
        np.testing.assert_array_equal(found.scored.rewards, np.ones((WANTED, SAMPLES)))
    without = 1 - np.mean(teaches[: drawn * WANTED])
    assert found.measured["reward/groups_without_signal"] == pytest.approx(without)


def test_without_it_a_batch_is_kept_as_it_is_and_the_next_one_follows():
    assert RunConfig(train=False, algorithm=AlgorithmConfig(dynamic_sampling=3)).num_redraws == 0
    found, drawn, _ = collected([False] * 15, most=0, first=2)
    assert [group.prompt.id for group in found.scored.groups] == [6, 7, 8] and drawn == 3


def test_what_is_counted_goes_on_from_where_a_run_was_left_and_has_batches_that_teach_nothing():
    found, drawn, _ = collected([False] * 6 + [True] * 9, 4, first=1)
    assert drawn == 3
    tokens = 2 * WANTED * SAMPLES * (1 + 3)  # a prompt of one, a response of three
    assert found.measured["progress/tokens"] == 1000 + tokens
    assert found.measured["progress/epoch"] == 3 / 4
    assert "progress/epoch" not in Totals().metrics(None)


class Events:
    """Stands for what models read of a batch: what is asked of them, in order."""

    def __init__(self):
        self.seen: list[str] = []
        self.columns, self.metrics = {}, {}

    def add(self, index: int, ended: Rollout) -> None:
        self.seen.append(f"add {index}")

    def ask(self, responses: Sequence[Rollout]) -> None:
        self.seen.append(f"ask for {len(responses)}")

    def wait(self) -> None:
        self.seen.append("wait")


def test_threads_are_asked_for_the_rest_before_rewards_are_waited_for(monkeypatch):
    reads = Events()

    def wait_for_rewards(*given: Any, wait=collect.wait_for_rewards) -> Any:
        reads.seen.append("rewards")
        return wait(*given)

    monkeypatch.setattr(collect, "wait_for_rewards", wait_for_rewards)
    collected([True] * 3, 0, reads=reads)
    ended = [f"add {i}" for i in range(WANTED * SAMPLES)]
    assert reads.seen == [*ended, f"ask for {len(ended)}", "rewards", "wait"]


def response(index: int) -> Rollout:
    return rollouts.response(np.full(1 + index % 3, index), Prompt(index, (1,), "text", {}))


def sums(rollouts: Sequence[Rollout]) -> Columns:
    return {"sums": [np.cumsum(one.tokens) for one in rollouts]}


def squares(rollouts: Sequence[Rollout]) -> Columns:
    return {"squares": [one.tokens**2 for one in rollouts]}


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(12)))
def test_columns_are_in_the_order_of_responses_whichever_ends_first(order: list[int]):
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        reads = ReadsAsTheyEnd([ReadingThread(one, sums), ReadingThread(other, squares)])
        for index in order:
            reads.add(index, response(index))
        reads.wait()
    every = [response(i) for i in range(len(order))]
    expected = {**sums(every), **squares(every)}
    assert reads.columns.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_equal(reads.columns[name], values)


def test_at_the_end_of_a_rollout_the_rest_is_read_before_anybody_waits_for_it():
    has_read = threading.Event()

    def predict(rollouts: Sequence[Rollout]) -> Columns:
        has_read.set()
        return sums(rollouts)

    with ThreadPoolExecutor(1) as thread:
        reads = ReadsAsTheyEnd([ReadingThread(thread, predict, lambda some: False)])
        reads.add(0, response(0))
        assert not has_read.is_set()
        reads.ask([])
        assert has_read.wait(30)
        reads.wait()


def test_an_error_of_a_thread_ends_the_iteration():
    def fail(rollouts: Sequence[Rollout]) -> Columns:
        raise RuntimeError("the thread's devices are gone")

    with ThreadPoolExecutor(1) as thread:
        reads = ReadsAsTheyEnd([ReadingThread(thread, fail)])
        reads.add(0, response(0))
        with pytest.raises(RuntimeError, match="devices are gone"):
            reads.wait()
        with pytest.raises(RuntimeError, match="devices are gone"):
            reads.add(1, response(1))
