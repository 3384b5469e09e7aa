"""Placements on two cores: what is predicted, what is chosen, and one tiny run of all processes."""

import numpy as np
import pytest

from benchmarks.planner.placement_two_cores import CASES, choice
from benchmarks.planner.two_core_processes import FLATTEN, SEPARATE
from benchmarks.planner.two_core_tables import Passes, Tables

READS = {"reference_logprobs": 1.0, "old_values": 1.0, "old_logprobs": 1.5}
SHAPES = (1, 128), (1, 320), (1, 640)
PASSES = Passes(READS, {"critic": 2.0, "train": 3.0}, {"critic": 0.25, "train": 0.25}, 0.5, SHAPES)


def tables(ended_s: np.ndarray) -> Tables:
    """With a rollout of 10 s and 10.5 s of all else: passes 9, reward 0.5, host 0.75, transfer 0.25."""
    clock = {"rollout": 10.0, "reward": 0.5, "update": 9.75, "transfer": 0.25}
    case = CASES["8 responses a core"]
    return Tables.of(case.workload(), (10.0, ended_s.tolist()), PASSES, 20.5, clock)


def test_without_overlap_an_iteration_is_the_sum_of_its_stages():
    assert tables(np.full(16, 10.0)).predicted("none").seconds == pytest.approx(20.5)


def test_nothing_is_hidden_if_all_responses_end_at_once():
    all_at_once = tables(np.full(16, 10.0))
    assert all_at_once.predicted("scores").seconds == pytest.approx(20.5)
    # The batches of groups are made beside the gradients.
    assert all_at_once.predicted("gradients").seconds == pytest.approx(20.5 + PASSES.batch_s)


def test_of_responses_that_end_early_only_the_rest_is_waited_for():
    ended_s = np.linspace(0.1, 1.0, 16)
    ended_s[CASES["8 responses a core"].lengths(0).argmin()] = 10.0
    early = tables(ended_s)
    scores, gradients = (early.predicted(name).seconds for name in ("scores", "gradients"))
    assert 10.0 + 5.0 + 1.5 < scores < 20.5 - 0.5 * sum(READS.values())
    # Steps, host and transfer come after the rollout.
    assert 10.0 + 1.5 < gradients < scores - 0.5 * 5.0


def test_flatten_is_left_for_what_is_faster_by_more_than_the_error():
    named = {FLATTEN: 10.0, SEPARATE["none"]: 14.0, SEPARATE["scores"]: 9.9}
    assert choice({**named, SEPARATE["gradients"]: 9.6}).chosen.name == FLATTEN
    assert choice({**named, SEPARATE["gradients"]: 9.0}).chosen.name == SEPARATE["gradients"]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_lengths_have_a_long_tail_and_are_those_of_every_iteration(case):
    first, second = case.lengths(0), case.lengths(1)
    assert sorted(first) == sorted(second) and (first != second).any()
    assert first.max() >= 8 * np.median(first) and first.max() <= case.cap
