"""The oracle knows every length beforehand: no planner is faster, and its path costs what it says."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner.oracle import oracle
from pat_jax.layout.buckets import Buckets
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.planning.types import MIGRATE_ALL, RECOMPUTE_ALL, Load, Plan, Split
from pat_jax.profiling.simulate.machine import Machine, Workload
from pat_jax.profiling.simulate.simulator import replay
from tests.bucket_limits import BucketLimits
from tests.fakes import SPLITS
from tests.profiling.replays import (
    CAP,
    CAPACITY,
    CONFIG,
    LONGEST_PROMPT,
    MACHINE,
    AtSteps,
    grouped,
    in_short_bursts,
    machines,
    make_machine,
    make_workload,
    queued,
    static_seconds,
    workloads,
)

DP8, DP4TP2, DP2TP4, TP8 = SPLITS
LENGTHS = LengthModel.empty(CAP)


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
@settings(deadline=None, max_examples=30)
@given(grouped, st.sampled_from(SPLITS))
def test_without_a_choice_it_is_the_static_replay(machine, workload, split):
    alone = Machine.of(machine.truth, (split,), CONFIG, capacity=CAPACITY)
    best = oracle(workload, alone)
    assert best.total_s == pytest.approx(static_seconds(workload, split, alone))
    assert (best.start, best.switches) == (split, ())


@settings(deadline=None, max_examples=15)
@given(queued, machines, st.data())
def test_no_planner_is_faster(workload, machine, data):
    best = oracle(workload, machine).total_s
    moments = st.lists(st.integers(0, CAP), max_size=4).map(sorted)
    path = tuple((at, data.draw(st.sampled_from(SPLITS))) for at in data.draw(moments))
    first = data.draw(st.sampled_from(SPLITS))
    below = data.draw(st.sampled_from([MIGRATE_ALL, RECOMPUTE_ALL, 15, 40]))
    for planner in (
        *map(FixedLayout, SPLITS),
        AtSteps(first, path, below),
        *(Restless(first, path, below, drawn) for drawn in (0, 1, 2)),
        CostModelPlanner(SPLITS, machine.truth, LENGTHS),
        *(CostModelPlanner((split,), machine.truth, LENGTHS) for split in SPLITS),
    ):
        assert replay(workload, planner, machine).total_s >= best * (1 - 1e-9)


@settings(deadline=None, max_examples=25)
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


def test_the_hosts_time_is_charged():
    workload = make_workload(4)
    alone = replace(MACHINE, host_s_per_sequence=0.001, splits=(DP2TP4,))
    busy = replay(workload, FixedLayout(DP2TP4), alone).total_s
    assert static_seconds(workload, DP2TP4) < oracle(workload, alone).total_s <= busy * (1 + 1e-9)


class TestBalance:
    """Of one layout: nothing but moves between its replicas is left to decide."""

    def test_they_are_as_many_as_a_smaller_bucket_needs(self):
        """Eight of the first replica, to which every eighth is dealt, run on alone."""
        workload = Workload(np.full(64, 10), np.where(np.arange(64) % 8 == 0, 120, 16), CAP)
        machine = make_machine(per_row=0.1, shift_per_token=1e-3)
        buckets = Buckets.of(SPLITS, 64, BucketLimits(1, 32, CAP + LONGEST_PROMPT))
        machine = in_short_bursts(replace(machine, buckets=buckets, splits=(DP8,)))
        best = oracle(workload, machine)
        even = replay(workload, CostModelPlanner((DP8,), machine.truth, LENGTHS), machine)
        assert (best.evened, best.switches, best.is_exact) == ((16,), (), False)
        # It takes no more for granted than that four of the eight have to leave the first replica.
        assert best.total_s == pytest.approx(even.spent("prefill", "decode") + 4 * 25 * 1e-3)
        migrate = {key: s for key, s in machine.truth.migrate_table.items() if key[0] != key[1]}
        unmoved = replace(machine, truth=replace(machine.truth, migrate_table=migrate))
        fixed = replay(workload, FixedLayout(DP8), unmoved)
        best = oracle(workload, unmoved)
        assert (best.evened, best.total_s) == ((), pytest.approx(fixed.total_s))

    @settings(deadline=None, max_examples=25)
    @given(grouped, st.sampled_from(SPLITS[:3]))
    def test_no_planner_is_faster_by_them(self, workload, split):
        machine = replace(make_machine(per_row=0.1, shift_per_token=0.01), splits=(split,))
        done = replay(workload, CostModelPlanner((split,), machine.truth, LENGTHS), machine)
        assert oracle(workload, machine).total_s <= done.total_s * (1 + 1e-9)
