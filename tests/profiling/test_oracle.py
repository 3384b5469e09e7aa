"""Who knows every length beforehand: never slower than any planner, and what regret is held against."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from fakes import SPLITS
from hypothesis import given, settings
from hypothesis import strategies as st
from replays import (
    CAP,
    CAPACITY,
    CONFIG,
    MACHINE,
    AtSteps,
    grouped,
    in_short_bursts,
    machines,
    make_machine,
    queued,
    static_seconds,
    workloads,
)

from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.planning.planner.scripts import FixedLayout, ScriptedPath, Step
from pat_jax.planning.types import MIGRATE_ALL, RECOMPUTE_ALL, Load, Plan, Split
from pat_jax.profiling.simulate.machine import Machine, Workload
from pat_jax.profiling.simulate.oracle import oracle
from pat_jax.profiling.simulate.regret import regret
from pat_jax.profiling.simulate.simulator import replay

DP8, _, _, TP8 = SPLITS


@dataclass
class Restless(AtSteps):
    """Moves sequences between the groups of a layout wherever it may, to what it drew of the options."""

    drawn: int = 0

    def decide(self, load: Load, current: Split, options: Sequence[np.ndarray] = ()) -> Plan:
        plan = super().decide(load, current, options)
        if plan.split != current or not options:
            return plan
        return replace(plan, replica=options[self.drawn % len(options)])


@pytest.mark.parametrize("machine", [MACHINE, make_machine(reads="held")], ids=["bucket", "held"])
@given(grouped, st.sampled_from(SPLITS))
def test_without_a_choice_it_is_the_static_replay(machine, workload, split):
    alone = Machine.of(machine.truth, (split,), CONFIG, capacity=CAPACITY)
    best = oracle(workload, alone)
    assert best.total_s == pytest.approx(static_seconds(workload, split, alone))
    assert (best.start, best.switches) == (split, ())


@settings(max_examples=15)
@given(queued, machines, st.data())
def test_no_planner_is_faster(workload, machine, data):
    best = oracle(workload, machine).total_s
    lengths = LengthModel.empty(CAP)
    moments = st.lists(st.integers(0, CAP), max_size=4).map(sorted)
    path = tuple((at, data.draw(st.sampled_from(SPLITS))) for at in data.draw(moments))
    first = data.draw(st.sampled_from(SPLITS))
    below = data.draw(st.sampled_from([MIGRATE_ALL, RECOMPUTE_ALL, 15, 40]))
    for planner in (
        *map(FixedLayout, SPLITS),
        AtSteps(first, path, below),
        *(Restless(first, path, below, drawn) for drawn in (0, 1, 2)),
        CostModelPlanner(SPLITS, machine.truth, lengths),
        *(CostModelPlanner((split,), machine.truth, lengths) for split in SPLITS),
    ):
        assert replay(workload, planner, machine).total_s >= best * (1 - 1e-9)


@settings(max_examples=25)
@given(workloads, machines)
def test_its_path_costs_what_it_says(workload, machine):
    machine = in_short_bursts(machine)  # groups are dealt by the pages for a burst
    best = oracle(workload, machine)
    done = replay(workload, AtSteps(best.start, best.switches), machine)
    if best.is_exact:
        assert done.total_s == pytest.approx(best.total_s)
    else:
        assert done.total_s >= best.total_s * (1 - 1e-9)


def test_it_switches_when_that_pays():
    """0.5 s against 0.25 s a step for 100 steps, and 0.25 s for the switch."""
    workload = Workload(np.full(8, 5), np.array([100, *[8] * 7]), CAP)
    machine = make_machine((0.5, 9.0, 9.0, 0.25), per_row=0.05)
    best = oracle(workload, machine)
    assert (best.start, best.switches, best.is_exact) == (DP8, ((8, TP8),), True)
    assert best.total_s < static_seconds(workload, DP8, machine)
    assert best.total_s < static_seconds(workload, TP8, machine)


@settings(deadline=None, max_examples=12)
@given(workloads, machines, st.integers(0, 3))
def test_regret_is_that_of_the_path_that_was_taken(workload, machine, start):
    fixed = replay(workload, FixedLayout(SPLITS[start]), machine)
    best = oracle(workload, machine).total_s
    assert regret(workload, machine, fixed.trace).share == pytest.approx(fixed.total_s / best - 1)
    later = SPLITS[start:][-1]
    script = ScriptedPath(SPLITS[0], (Step(later, workload.size // 3),) if start else ())
    moved = replay(workload, script, machine)
    assert regret(workload, machine, moved.trace).share == pytest.approx(moved.total_s / best - 1)
    assert regret(workload, machine, moved.trace).share >= -1e-9
    planner = CostModelPlanner(SPLITS, machine.truth, LengthModel.empty(CAP))
    planned = replay(workload, planner, machine)
    assert regret(workload, machine, planned.trace).share >= -1e-9
