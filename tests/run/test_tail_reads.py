"""What is read while a rollout ends on half of the devices, and what is read afterwards."""

import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partialmethod
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_jax.common.errors import UserError
from pat_jax.common.hosts.lane_thread import LaneThread
from pat_jax.rl.algorithm.logprobs import next_tokens
from pat_jax.rl.batches.batches import MicroBatch, TrainBatch
from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout
from pat_jax.rl.rewards.model import NextBatch, Score
from pat_jax.run.process.stop_signals import Stopped
from pat_jax.run.start.tail import CopiedJudge, TailModels
from pat_jax.run.tail_reads import TailReads
from pat_jax.training.copied_reader import CopiedReader
from pat_jax.training.roles import Prediction

SHAPES = [(2, 32), (4, 32)]
SAMPLES = 4


def threads() -> list[str]:
    """Those that read in a tail."""
    return [x.name for x in threading.enumerate() if x.name.startswith("tail")]


def response(index: int) -> Rollout:
    tokens = np.full(1 + 5 * index % 13, index, np.int32)
    prompt = Prompt(index // SAMPLES, (1,) * (1 + index // SAMPLES), "text", {})
    return Rollout(prompt, index % SAMPLES, tokens, np.zeros(len(tokens)), FinishReason.STOP)


def doubled(batch: TrainBatch) -> TrainBatch:
    """Reads in `doubles` twice each token."""

    def read(micro: MicroBatch) -> MicroBatch:
        column = 2.0 * next_tokens(jnp.asarray(micro.tokens))
        return replace(micro, columns={**micro.columns, "doubles": column})

    return replace(batch, mini_batches=[[*map(read, mini)] for mini in batch.mini_batches])


class Copy:
    """A copied reader without a model: notes what happens to it."""

    column, fails = "doubles", False

    def __init__(self):
        self.sizes, self.is_there = list[int](), False
        self.has_read = threading.Event()
        self.reader = self
        self.devices = frozenset()

    def begin(self, states: object) -> None:
        self.is_there = True

    def end(self) -> None:
        self.is_there = False

    def read(self, batch: TrainBatch) -> TrainBatch:
        assert self.is_there, "copies are there while something is read"
        self.sizes.append(len(batch.places))
        self.has_read.set()
        if self.fails:
            raise RuntimeError("no device")
        return doubled(batch)


def reads(
    copy: Copy,
    judges: Sequence[CopiedJudge] = (),
    *,
    shares: bool = False,
    whole_sizes: list[int] | None = None,
) -> TailReads:
    """`whole_sizes` notes how many responses all devices read."""
    copies = [cast(CopiedReader, copy)]
    models = TailModels(4, cast(Any, None), (), copies, judges, copies)

    def on_all(batch: TrainBatch) -> TrainBatch:
        if whole_sizes is not None:
            whole_sizes.append(len(batch.places))
        return doubled(batch)

    whole = Prediction("doubles", frozenset(), True, on_all)
    return TailReads(models, [whole], SHAPES, {}, shares)


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(24)), st.integers(0, 24), st.booleans())
def test_every_column_is_read_once_in_the_tail_or_after_it(
    order: list[int], begin: int, shares: bool
):
    copy, rest = Copy(), list[int]()
    tail = reads(copy, shares=shares, whole_sizes=rest)
    for index in order[:begin]:
        tail.add(index, response(index))
    with tail.reading():
        if begin == 24:  # enough for a micro-batch
            assert copy.has_read.wait(30)
        for index in order[begin:]:
            tail.add(index, response(index))
    assert not copy.is_there and threads() == []
    tail.ask()
    tail.wait(24)
    expected = [2.0 * response(i).tokens for i in range(24)]
    np.testing.assert_equal(tail.columns["doubles"], expected)
    assert sum(copy.sizes) + sum(rest) == 24 and len(rest) <= 1  # each is read once
    assert (copy.sizes != []) == (tail.busy_seconds > 0)


def test_without_a_tail_all_is_read_afterwards():
    copy = Copy()
    tail = reads(copy)
    for index in range(8):
        tail.add(index, response(index))
    tail.wait(8)
    assert len(tail.columns["doubles"]) == 8 and copy.sizes == [] and not copy.is_there


@pytest.mark.parametrize("is_told", [True, False])
def test_an_error_of_the_thread_is_raised(is_told: bool):
    copy = Copy()
    copy.fails = True
    tail = reads(copy)
    for index in range(24):
        tail.add(index, response(index))
    with pytest.raises(RuntimeError, match="no device"), tail.reading():
        assert copy.has_read.wait(30)
        deadline = time.monotonic() + 30
        while is_told and time.monotonic() < deadline:
            tail.add(24, response(24))
        if is_told:
            pytest.fail("it is raised before")
    assert not copy.is_there


def test_an_error_of_the_rollout_ends_the_thread():
    copy = Copy()
    tail = reads(copy)
    with pytest.raises(ValueError, match="of the rollout"), tail.reading():
        raise ValueError("of the rollout")
    assert threads() == [] and not copy.is_there


@pytest.mark.parametrize("error", [None, Stopped(signal.SIGTERM)])
def test_what_keeps_this_process_from_its_part_is_raised_first(error: BaseException | None):
    """As a scorer that failed: the thread may wait for it for ever."""
    copy = Copy()
    tail = reads(copy)

    def check() -> None:
        raise UserError("of the scorer")

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(UserError, match="of the scorer"),
        tail.reading(check),
    ):
        patch.setattr(LaneThread, "finish", lambda thread: pytest.fail("it would wait"))
        if error:
            raise error
    assert threads() == [] and not copy.is_there


def test_copies_are_there_until_the_thread_has_ended_though_a_signal_comes():
    """As one that comes while the main thread waits for the other."""
    copy, may_end, waits = Copy(), threading.Event(), list[bool]()

    def slowly(batch: TrainBatch) -> TrainBatch:
        copy.has_read.set()
        assert may_end.wait(30)
        assert copy.is_there
        return doubled(batch)

    copy.read = slowly  # pyright: ignore[reportAttributeAccessIssue]
    tail = reads(copy)
    for index in range(24):
        tail.add(index, response(index))

    def interrupted(thread: LaneThread, close: Callable[[LaneThread], None]) -> None:
        waits.append(copy.is_there)
        if len(waits) == 1:
            raise KeyboardInterrupt
        may_end.set()
        close(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LaneThread, "close", partialmethod(interrupted, LaneThread.close))
        with pytest.raises(KeyboardInterrupt), tail.reading():
            assert copy.has_read.wait(30)
            raise ValueError("of the rollout")
    assert waits == [True, True] and threads() == [] and not copy.is_there


def test_what_a_stopped_rollout_has_begun_is_completed():
    copy = Copy()
    tail = reads(copy)
    for index in range(24):
        tail.add(index, response(index))
    with pytest.raises(Stopped), tail.reading():
        assert copy.has_read.wait(30)
        raise Stopped(signal.SIGTERM)
    assert threads() == [] and not copy.is_there


class Judge:
    """A reward model whose texts have 3 tokens each. Notes how many are scored at once."""

    def __init__(self):
        self.sizes, self.has_scored = list[int](), threading.Event()
        self.scores = self

    @property
    def scorer(self) -> "Judge":
        return self

    def __call__(self, texts: Sequence[np.ndarray]) -> np.ndarray:
        self.sizes.append(len(texts))
        self.has_scored.set()
        return np.zeros(len(texts), np.float32)

    def next_batch(self, lengths: Sequence[int]) -> int:
        return 2 if len(lengths) >= 2 else 0

    def score_on(
        self,
        lane: LaneThread | None,
        score: Score | None = None,
        next_batch: NextBatch | None = None,
    ) -> None:
        if lane is None:
            return
        assert score is not None and next_batch is not None
        choose = next_batch  # of numbers of tokens, as these are

        def scored(lengths: Sequence[int]) -> None:
            score([np.zeros(n, np.int32) for n in lengths])

        gathering = lane.gathering(scored, int, lambda waiting: range(choose(waiting)))
        for _ in range(5):
            gathering.add(3)


def test_reward_models_score_meanwhile():
    judge = Judge()
    tail = reads(Copy(), [cast(CopiedJudge, judge)])
    with tail.reading():
        assert judge.has_scored.wait(30)
    assert tail.busy_seconds > 0 and {*judge.sizes} == {2}
