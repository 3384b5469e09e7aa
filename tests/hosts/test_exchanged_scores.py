"""Processes that tell each other rewards as they come: each knows a complete group, and the same."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from joined import begin_in_each, companies, in_each, wait_for

from pat_jax.common.errors import UserError
from pat_jax.common.hosts.lane_thread import LaneThread
from pat_jax.common.hosts.together import ProcessGroup
from pat_jax.rl.rewards.outcome import Cause
from pat_jax.rl.rewards.responses import Response
from pat_jax.rl.rewards.scorer import RewardScorer, Scoring
from pat_jax.rl.rewards.weighted_sum import Score, weighted_sum
from pat_jax.run.early_gradients import EarlyGradients, TrainedLane
from pat_jax.training.summed_gradients import SummedGradients
from pat_jax.training.trainer import Trainer

FUNCTIONS = """
import os

def compare(completions, **_):
    return [len(x) / max(map(len, completions)) for x in completions]

def fails(completions, **_):
    if "bb" in completions:
        raise ValueError("no b")
    if "crash" in completions:
        os._exit(3)
    return [None if x == "none" else 0.5 for x in completions]
"""
SIZE = 2
PROMPTS = [p for p in "pqrstu" for _ in range(SIZE)]
ANSWERS = ["a", "bb", "ccc", "none", "crash", "c", "eeee", "e", "", "ff", "g", "hhh"]
COUNT = len(PROMPTS) // SIZE
TOLD = [Response(p, answer, {}) for p, answer in zip(PROMPTS, ANSWERS, strict=True)]


def numbered(prompt: str, text: str, answer: str = "") -> Response:
    """A response to score by `exact`, which has no answer unless one is given."""
    answers = {"answer": answer} if answer else {}
    return Response(prompt, f"#{text}", {"finish_reason": "stop", **answers})


@pytest.fixture
def functions(tmp_path: Path) -> str:
    (path := tmp_path / "mine.py").write_text(FUNCTIONS)
    return str(path)


class Kept:
    """Scores on disk, the same in every process."""

    def __init__(self) -> None:
        self.scores: dict[int, dict[str, Score]] = {
            row: {"compare": (100.0 + row, {})} for row in (2, 3, 6)
        }

    def keep(self, place: int, function: str, score: Score) -> None:
        pass


def early_of(us: ProcessGroup, lane: LaneThread, scorer: RewardScorer, seed: int) -> Any:
    """What a process has summed, portion by portion, and at the end its rewards and failures.
    Responses end in another order in each."""
    summed: list[tuple[list[int], list[list[float]]]] = []
    ended: list[int] = []

    def make_batch(groups: Sequence[int]) -> Any:
        rows = [SIZE * group + i for group in groups for i in range(SIZE)]
        assert {*rows} <= {*ended}
        rewards = weighted_sum(scoring.scores_of(rows))[0].reshape(-1, SIZE)
        summed.append((list(groups), rewards.tolist()))
        return None, 0.0

    def no_role(role: Trainer) -> SummedGradients:
        raise AssertionError("the lane has no role")

    def note(row: int) -> None:
        early.note(row // SIZE)

    early = EarlyGradients([TrainedLane(lane, [])], COUNT, SIZE, make_batch, no_role)
    scoring: Scoring[int] = scorer.begin(PROMPTS, TOLD.__getitem__, Kept(), note)
    for row in np.random.default_rng((seed, us.index)).permutation(len(TOLD)).tolist():
        ended.append(row)
        scoring.add(row, row)
    rewards = scoring.rewards().tolist()
    early.wait()
    return summed, rewards, {row: x.cause for row, x in scoring.failures.items()}


@pytest.mark.parametrize("count", [2, 3])
def test_every_process_sums_the_same_groups_with_the_rewards_of_the_end(ended, functions, count):
    """In two rollouts, one after the other."""
    specs = [f"{functions}:compare", f"{functions}:fails"]

    def work(us: ProcessGroup) -> Any:
        scorer = RewardScorer(*specs, timeout=30.0, shares=us)
        with LaneThread("lane", us) as lane, scorer:
            found = [early_of(us, lane, scorer, seed) for seed in range(2)]
            lane.finish()
            return found

    with companies(count) as found:
        first, *others = in_each(found, work)
    alone = work(ProcessGroup())
    for (summed, rewards, causes), (_, *expected) in zip(first, alone, strict=True):
        np.testing.assert_equal([rewards, causes], expected)
        assert causes == {1: Cause.EXCEPTION, 4: Cause.CRASHED}
        by_group = {g: x for groups, each in summed for g, x in zip(groups, each, strict=True)}
        used = [x for group in range(COUNT) for x in by_group[group]]
        np.testing.assert_equal(used, rewards)
    for other in others:
        np.testing.assert_equal(other, first)
    assert ended == []


@pytest.mark.parametrize("count", [2, 5])
def test_a_process_is_told_of_a_response_when_it_has_ended_there(ended, count):
    """Though another process has told its score before; also a process that scores none."""
    prompts = ["p", "q", "r"]
    answers = [numbered(prompt, "1", str(i)) for i, prompt in enumerate(prompts, 1)]
    told: list[list[int]] = [[] for _ in range(count)]

    def work(us: ProcessGroup) -> list[float]:
        with RewardScorer("exact", timeout=1.0, shares=us) as scorer:
            scoring = scorer.begin(prompts, answers.__getitem__, None, told[us.index].append)
            own = list(range(3))[us.index :: count]
            for row in own:
                scoring.add(row, row)
            wait_for(lambda: told[us.index] == own)
            us.gather("scored", None)  # what the others have told is here
            scorer.thread.submit(int).result()
            assert told[us.index] == own
            for row in {*range(3)} - {*own}:
                scoring.add(row, row)
            return scoring.rewards().tolist()

    with companies(count) as found:
        assert in_each(found, work) == [[1.0, 0.0, 0.0]] * count
    assert all(sorted(rows) == [0, 1, 2] for rows in told) and ended == []


@pytest.mark.parametrize("broken", [0, 1])
def test_a_mistake_in_one_process_ends_all_with_its_sentence(ended, capfd, broken):
    """The others learn of it while they wait for its scores."""
    prompts = ["p", "q"]
    answers = [numbered(x, "1", "" if i == broken else "1") for i, x in enumerate(prompts)]

    def work(us: ProcessGroup) -> None:
        with RewardScorer("exact", timeout=1.0, shares=us) as scorer:
            scoring = scorer.begin(prompts, answers.__getitem__, None, lambda row: None)
            try:
                for row in range(len(prompts)):
                    scoring.add(row, row)
                scoring.rewards()
            except UserError as error:
                assert us.index == broken
                us.fail(str(error), 1)

    with companies(2) as found:
        begin_in_each(found, work)
        wait_for(lambda: len(ended) == 2)
    output = capfd.readouterr().err
    assert output.count("needs the column 'answer'") == 2 and f"process {broken} " in output


def test_an_error_of_who_is_told_is_raised_with_the_rewards():
    """As when the thread of a lane has failed: nobody waits for the last reward for ever."""

    def fail(row: int) -> None:
        raise RuntimeError("the lane's devices are gone")

    with RewardScorer("exact", timeout=1.0) as scorer:
        scoring = scorer.begin(["p"], [numbered("p", "1", "1")].__getitem__, None, fail)
        scoring.add(0, 0)
        with pytest.raises(RuntimeError, match="devices are gone"):
            scoring.rewards()


def test_what_one_process_tells_all_others_hear_in_its_order(ended):
    """Also what they were told before they listened."""
    heard: list[list[tuple[int, int]]] = [[] for _ in range(3)]

    def work(us: ProcessGroup) -> None:
        if us.index != 2:
            us.listen("numbers", heard[us.index].append)
        for i in range(50):
            us.tell("numbers", (us.index, i))
        us.gather("all have told", None)
        if us.index == 2:
            us.listen("numbers", heard[us.index].append)
        wait_for(lambda: len(heard[us.index]) == 100)
        us.forget("numbers")

    with companies(3) as found:
        assert in_each(found, work) == [None] * 3
    for index, one in enumerate(heard):
        for other in {0, 1, 2} - {index}:
            assert [i for who, i in one if who == other] == [*range(50)]
    assert ended == []
