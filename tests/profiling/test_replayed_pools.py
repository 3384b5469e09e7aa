"""Replays in pools of pages: room for all, for some, and who gives way."""

from dataclasses import replace

import numpy as np
import pytest
from fakes import SPLITS
from hypothesis import given, settings
from hypothesis import strategies as st
from replays import CAP, MACHINE, AtSteps, in_short_bursts, machines, with_pools, workloads

from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.profiling.simulate.machine import Workload
from pat_jax.profiling.simulate.simulator import replay

DP8, _, DP2TP4, TP8 = SPLITS


class TestPools:
    @settings(deadline=None)
    @given(workloads, st.sampled_from(SPLITS))
    def test_where_everything_fits_they_make_no_difference(self, workload, split):
        free = replay(workload, FixedLayout(split), MACHINE)
        pooled = replay(workload, FixedLayout(split), with_pools(MACHINE, 1000))
        assert pooled.preempted == 0
        # Who is in which group may differ: the engine deals out by free pages.
        assert pooled.trace.total_steps == free.trace.total_steps
        assert pooled.trace.done_after == free.trace.done_after
        if split.dp == 1:
            assert pooled == free

    @settings(deadline=None, max_examples=15)
    @given(workloads, machines, st.integers(12, 40), st.integers(0, 150))
    def test_everything_ends_in_pools_of_any_size(self, workload, machine, pages, at):
        """The longest sequence of all needs eleven pages."""
        machine = with_pools(machine, pages)
        lengths = LengthModel.empty(CAP)
        for planner in (
            *map(FixedLayout, SPLITS),
            AtSteps(DP8, ((at, TP8), (at + 30, DP2TP4)), at // 2),
            CostModelPlanner(SPLITS, machine.truth, lengths, memory=machine.memory),
        ):
            done = replay(workload, planner, machine)
            assert len(done.trace.done_after) == workload.size
            assert done.total_s == pytest.approx(
                done.spent("prefill", "decode", "switch", "balance")
            )
            # Every token is said in some step of a burst in which its sequence was running.
            output = sum(burst.running * burst.steps for burst in done.bursts)
            assert output >= workload.responses.sum()

    def test_who_gives_way_is_computed_again(self):
        """Two sequences of 160 tokens in twelve pages of 16: one of them waits for the other."""
        workload = Workload(np.full(2, 10), np.full(2, 150), CAP)
        short = in_short_bursts(with_pools(MACHINE, 12))
        assert short.memory is not None
        alone = replace(short, splits=(TP8,), memory=replace(short.memory, pages={TP8: 12}))
        done = replay(workload, FixedLayout(TP8), alone)
        assert done.preempted == 1
        assert max(burst.running for burst in done.bursts) == 2
        assert {burst.running for burst in done.bursts[-4:]} == {1}
        roomy = replay(workload, FixedLayout(TP8), in_short_bursts(with_pools(MACHINE, 100)))
        assert done.trace.total_steps > 1.4 * roomy.trace.total_steps
        assert done.spent("prefill") > roomy.spent("prefill")
