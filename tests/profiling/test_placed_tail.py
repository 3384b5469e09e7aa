"""Replays of rollouts whose last responses are generated on half of the devices."""

from dataclasses import replace

import numpy as np
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


def alone(machine: Machine) -> Machine:
    return replace(machine, splits=(WIDEST,))


def done(work: Workload, machine: Machine = MACHINE) -> Replayed:
    """A rollout of a machine's one layout."""
    planner = CostModelPlanner((WIDEST,), machine.truth, LengthModel.empty(CAP))
    report, ended_s = replayed(work, planner, alone(machine))
    return Replayed(work, report.total_s, ended_s, False, WIDEST)


def seconds_of(token_s: float):
    return lambda work: token_s * float((work.prompts + work.responses).sum())


@settings(max_examples=30, deadline=None)
@given(grouped, st.integers(1, 40), st.floats(1e-6, 1e-1))
def test_models_read_one_response_after_the_other_while_the_tail_lasts(
    work: Workload, left: int, token_s: float
):
    rollout = done(work)
    found = with_tail(rollout, left, Half(alone(MACHINE), 2, 0.5, seconds_of(token_s)))
    if left >= work.size:
        assert found is None
        return
    begin_s = np.sort(rollout.ended_s)[work.size - left - 1]
    if found is None:
        assert begin_s == rollout.ended_s.max()
        return
    tail_s = found.rollout_s - begin_s - 0.5
    tokens = work.prompts + work.responses
    assert tail_s > 0 and token_s * tokens[found.is_read].sum() <= tail_s * (1 + 1e-9)
    assert (~found.is_read).sum() >= min(2, work.size)  # the last two fill no micro-batch
    before = rollout.ended_s <= begin_s
    if before.any() and not found.is_read[before].all():
        last_s = rollout.ended_s[found.is_read & before].max(initial=0.0)
        assert (rollout.ended_s[~found.is_read & before] >= last_s).all()
        assert not found.is_read[~before].any()
    faster = with_tail(rollout, left, Half(alone(MACHINE), 2, 0.5, seconds_of(token_s / 2)))
    assert faster is not None and not (found.is_read & ~faster.is_read).any()


def test_a_half_that_is_as_fast_costs_the_move_and_the_prefill():
    work = make_workload(3)
    machine = make_machine(prefill=1e-9)
    rollout = done(work, machine)
    half = Half(alone(machine), 2, 0.25, seconds_of(1e-9))
    found = with_tail(rollout, 8, half)
    assert found is not None and found.is_read.sum() >= 24
    # Which sequences share a row bucket differs: rows are assigned anew.
    assert abs(found.added_s - 0.25) < 0.15 * rollout.total_s


def test_slower_halves_add_their_seconds():
    work, slow = make_workload(3), make_machine(step=(1.0, 0.8, 0.6, 0.5), per_row=0.04)
    rollout, read = done(work), seconds_of(1e-9)
    as_fast, slower = (
        with_tail(rollout, 8, Half(alone(machine), 2, 0.0, read)) for machine in (MACHINE, slow)
    )
    assert as_fast and slower
    begin_s = np.sort(rollout.ended_s)[work.size - 9]
    assert 1.5 < (slower.rollout_s - begin_s) / (as_fast.rollout_s - begin_s) < 2.2
    assert slower.added_s - as_fast.added_s == slower.rollout_s - as_fast.rollout_s


def test_no_tail_where_all_have_ended_or_none_has():
    work = make_workload(3)
    rollout, half = done(work), Half(alone(MACHINE), 2, 0.0, seconds_of(1e-3))
    assert with_tail(rollout, work.size, half) is None
    at_once = replace(rollout, ended_s=np.full(work.size, rollout.total_s))
    assert with_tail(at_once, 4, half) is None
