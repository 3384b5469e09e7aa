"""Columns that are predicted while others are still generated are those of all responses."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout
from pat_jax.run.early_columns import Columns, EarlyColumns, Lane


def response(index: int) -> Rollout:
    tokens = np.full(1 + index % 3, index, np.int32)
    prompt = Prompt(index, (1,), "text", {})
    return Rollout(prompt, 0, tokens, np.zeros(len(tokens)), FinishReason.STOP)


def sums(rollouts: Sequence[Rollout]) -> Columns:
    return {"sums": [np.cumsum(one.tokens) for one in rollouts]}


def squares(rollouts: Sequence[Rollout]) -> Columns:
    return {"squares": [one.tokens**2 for one in rollouts]}


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(12)))
def test_columns_are_in_the_order_of_responses_whichever_ends_first(order: list[int]):
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        early = EarlyColumns([Lane(one, sums), Lane(other, squares)])
        for index in order:
            early.add(index, response(index))
        early.wait(len(order))
    every = [response(i) for i in range(len(order))]
    expected = {**sums(every), **squares(every)}
    assert early.columns.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_equal(early.columns[name], values)


def test_at_the_end_of_a_rollout_the_rest_is_read_before_anybody_waits_for_it():
    has_read = threading.Event()

    def predict(rollouts: Sequence[Rollout]) -> Columns:
        has_read.set()
        return sums(rollouts)

    with ThreadPoolExecutor(1) as thread:
        early = EarlyColumns([Lane(thread, predict, lambda some: False)])
        early.add(0, response(0))
        assert not has_read.is_set()
        early.ask()
        assert has_read.wait(30)
        early.wait(1)


def test_an_error_of_a_lane_ends_the_iteration():
    def fail(rollouts: Sequence[Rollout]) -> Columns:
        raise RuntimeError("the lane's devices are gone")

    with ThreadPoolExecutor(1) as thread:
        early = EarlyColumns([Lane(thread, fail)])
        early.add(0, response(0))
        with pytest.raises(RuntimeError, match="devices are gone"):
            early.wait(1)
        with pytest.raises(RuntimeError, match="devices are gone"):
            early.add(1, response(1))


def test_without_lanes_nothing_is_known_early():
    early = EarlyColumns([])
    early.add(0, response(0))
    early.wait(1)
    assert early.columns == {}
