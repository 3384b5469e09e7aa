"""Replays of rollouts whose last responses are generated on half of the devices."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replays import CAP, MACHINE, grouped, make_machine, make_workload

from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.profiling.capacity.placed_tail import Half, with_tail
from pat_jax.profiling.simulate.comparison import Replayed
from pat_jax.profiling.simulate.machine import Machine, Workload
from pat_jax.profiling.simulate.simulator import replayed

WIDEST = max(MACHINE.splits, key=lambda split: split.tp)
PART = 3  # responses that are read together


def alone(machine: Machine) -> Machine:
    return replace(machine, splits=(WIDEST,))


def done(work: Workload, machine: Machine = MACHINE) -> Replayed:
    """A rollout of a machine's one layout."""
    planner = CostModelPlanner((WIDEST,), machine.truth, LengthModel.empty(CAP))
    report, ended_s = replayed(work, planner, alone(machine))
    return Replayed(work, report.total_s, ended_s, False, WIDEST)


def seconds_of(token_s: float) -> Callable[[Workload], Mapping[str, float]]:
    def reads_s(work: Workload) -> Mapping[str, float]:
        seconds = token_s * float((work.prompts + work.responses).sum())
        return {"values": seconds / 4, "scores": 3 * seconds / 4}

    return reads_s


def in_parts(work: Workload) -> int:
    return PART if work.size >= PART else 0


def half_of(machine: Machine, token_s: float, moved_s: float = 0.0, times: float = 1.0) -> Half:
    return Half(alone(machine), moved_s, in_parts, seconds_of(token_s), times)


def begin_of(rollout: Replayed, left: int) -> float:
    return np.sort(rollout.ended_s)[rollout.workload.size - left - 1]


@settings(max_examples=30, deadline=None)
@given(grouped, st.integers(1, 40), st.floats(1e-5, 1e-1))
def test_models_read_a_part_after_the_other_and_complete_the_last(
    work: Workload, left: int, token_s: float
):
    rollout = done(work)
    found = with_tail(rollout, left, half_of(MACHINE, token_s, moved_s=0.5))
    if left >= work.size:
        assert found is None
        return
    begin_s = begin_of(rollout, left)
    if found is None:
        assert begin_s == rollout.ended_s.max()
        return
    whole_s = found.rollout_s - begin_s - 0.5
    tokens = work.prompts + work.responses
    read_s = token_s * tokens[found.is_read].sum()
    assert sum(found.read_s.values()) == pytest.approx(read_s)
    assert found.is_read.sum() % PART == 0 and read_s <= whole_s * (1 + 1e-9)
    without = with_tail(rollout, left, half_of(MACHINE, 1e-12, moved_s=0.5))
    assert without is not None  # the rollout waits for the part that has begun, and for no other
    longest = np.sort(tokens)[-PART:].sum()
    assert 0 <= found.rollout_s - without.rollout_s <= token_s * longest * (1 + 1e-9)


def test_a_half_that_is_as_fast_costs_the_move_and_the_prefill():
    work, machine = make_workload(3), make_machine(prefill=1e-9)
    rollout = done(work, machine)
    found = with_tail(rollout, 8, half_of(machine, 1e-9, moved_s=0.25))
    assert found is not None and found.is_read.sum() >= 24
    # Which sequences share a row bucket differs: rows are assigned anew.
    assert abs(found.rollout_s - rollout.total_s - 0.25) < 0.15 * rollout.total_s


def test_siblings_share_none_of_what_they_have_generated():
    strangers, siblings = make_workload(3), make_workload(3, samples=8)
    siblings = replace(siblings, prompts=strangers.prompts, responses=strangers.responses)
    machine = make_machine(prefill=5.0)
    tails = [with_tail(done(x, machine), 8, half_of(machine, 1e-9)) for x in (strangers, siblings)]
    seconds = [
        x.rollout_s - begin_of(done(w, machine), 8)
        for x, w in zip(tails, (strangers, siblings), strict=True)
        if x
    ]
    assert len(seconds) == 2 and seconds[0] == pytest.approx(seconds[1], rel=0.05)


@pytest.mark.parametrize("slower", ["machine", "times"])
def test_slower_halves_add_their_seconds(slower: str):
    work, slow = make_workload(3), make_machine(step=(1.0, 0.8, 0.6, 0.5), per_row=0.04)
    rollout = done(work)
    asked = {"machine": half_of(slow, 1e-9), "times": half_of(MACHINE, 1e-9, times=2.0)}
    found = [with_tail(rollout, 8, x) for x in (half_of(MACHINE, 1e-9), asked[slower])]
    tails_s = [x.rollout_s - begin_of(rollout, 8) for x in found if x]
    assert 1.5 < tails_s[1] / tails_s[0] < 2.2


def test_no_tail_where_all_have_ended_or_none_has_or_some_waited():
    work = make_workload(3)
    rollout, half = done(work), half_of(MACHINE, 1e-3)
    assert with_tail(rollout, work.size, half) is None
    at_once = replace(rollout, ended_s=np.full(work.size, rollout.total_s))
    assert with_tail(at_once, 4, half) is None
    assert with_tail(replace(rollout, is_pressed=True), 4, half) is None
    assert with_tail(rollout, 4, half) is not None
