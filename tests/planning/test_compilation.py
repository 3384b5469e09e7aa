"""Which layouts are worth compiling: what they save in the iterations left outweighs the compiling."""

import numpy as np
import pytest
from fakes import SPLITS, made_up_latency, make_load
from made_up_memory import make_memory

from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.compilation import HOPED_SAVING, worth_compiling
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.planning.types import Split

DP8, DP4TP2, DP2TP4, TP8 = SPLITS
CAP, ITERATIONS = 400, 100
LOAD = make_load(96, DP8, remaining_tokens=CAP)
LONG_TAIL = LengthModel.empty(CAP, prior_weight=1e-3).updated(
    np.array([50] * 95 + [CAP] * 5), np.zeros(100, bool)
)


def make_planner(splits: tuple[Split, ...], **step: float) -> CostModelPlanner:
    """Of a machine whose steps are known in the layouts of `step`."""
    seconds = {split: step[str(split)] for split in SPLITS if str(split) in step}
    rows = {split: 0.01 * split.tp for split in seconds}
    latency = made_up_latency(
        seconds, rows, reshard=0.5, migrate_per_token=5e-4, max_rows=128, lengths=(64, 512)
    )
    return CostModelPlanner(splits, latency, LONG_TAIL)


def saving_s(planner: CostModelPlanner, split: Split) -> float:
    alone_s = planner.rollout_s(LOAD)
    planner.splits = (*planner.splits, split)
    saving = alone_s - planner.rollout_s(LOAD)
    planner.splits = planner.splits[:-1]
    return saving


@pytest.mark.parametrize(("share", "is_worth_it"), [(0.99, True), (1.01, False)])
def test_what_a_rollout_saves_counts_in_each_iteration_left(share: float, is_worth_it: bool):
    planner = make_planner((DP8,), dp8tp1=0.8, dp1tp8=0.2)
    saving = saving_s(planner, TP8)
    assert saving > 10
    cost = {TP8: share * ITERATIONS * saving}
    assert worth_compiling(planner, LOAD, cost, ITERATIONS) == [TP8] * is_worth_it
    assert worth_compiling(planner, LOAD, cost, 0) == []


@pytest.mark.parametrize(("share", "is_worth_it"), [(0.99, True), (1.01, False)])
def test_a_layout_that_never_ran_is_hoped_to_save_a_share(share: float, is_worth_it: bool):
    planner = make_planner((DP8,), dp8tp1=0.8)
    cost = share * ITERATIONS * HOPED_SAVING * planner.rollout_s(LOAD)
    # The second as well: nothing says that it is no better than the first.
    found = worth_compiling(planner, LOAD, {TP8: cost, DP4TP2: 0.9 * cost}, ITERATIONS)
    assert found == ([DP4TP2, TP8] if is_worth_it else [DP4TP2])


def test_each_is_compared_with_those_that_are_compiled_before_it():
    """Alone both would pay; beside the better one the other saves nothing."""
    planner = make_planner((DP8,), dp8tp1=0.8, dp2tp4=0.3, dp1tp8=0.3)
    cost = dict.fromkeys((DP2TP4, TP8), 0.5 * ITERATIONS * saving_s(planner, TP8))
    assert cost[TP8] > 0
    for alone in cost:
        assert worth_compiling(planner, LOAD, {alone: cost[alone]}, ITERATIONS) == [alone]
    assert worth_compiling(planner, LOAD, cost, ITERATIONS) == [DP2TP4]


def test_a_slower_layout_is_worth_nothing():
    planner = make_planner((DP8,), dp8tp1=0.2, dp1tp8=0.8)
    assert worth_compiling(planner, LOAD, {TP8: 1e-6}, 10**9) == []


def test_a_layout_without_room_is_worth_nothing():
    planner = make_planner((TP8,), dp1tp8=0.8)
    narrow, roomy = make_memory(2000), make_memory(1e9)
    for planner.memory, found in ((roomy, [DP8]), (narrow, [])):
        assert planner.memory.has_room((TP8, DP8))[1] == bool(found)
        assert worth_compiling(planner, LOAD, {DP8: 0.0}, ITERATIONS) == found
