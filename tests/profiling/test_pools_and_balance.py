"""Replays in pools that are too small, and moves between the replicas of a layout."""

from dataclasses import replace

import numpy as np
import pytest
from fakes import SPLITS
from hypothesis import given, settings
from hypothesis import strategies as st
from replays import (
    CAP,
    LONGEST_PROMPT,
    MACHINE,
    AtSteps,
    grouped,
    in_short_bursts,
    machines,
    make_machine,
    with_pools,
    workloads,
)

from pat_jax.engine.record.report import RolloutReport
from pat_jax.engine.rollout import rollout
from pat_jax.layout.buckets import Buckets
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.planning.types import Load, Moved, Plan, Split
from pat_jax.profiling.simulate.machine import Machine, Workload
from pat_jax.profiling.simulate.simulator import SimulatedExecutor, replay, waiting
from tests.bucket_limits import BucketLimits

DP8, DP4TP2, DP2TP4, TP8 = SPLITS


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


class TestBalance:
    """A planner with one layout: nothing but moves between its groups is left to decide."""

    lengths = LengthModel.empty(CAP)

    # Eight of the first group, to which every eighth is dealt, run on alone.
    workload = Workload(np.full(64, 10), np.where(np.arange(64) % 8 == 0, 120, 16), CAP)
    machine = replace(
        make_machine(per_row=0.1, shift_per_token=1e-3),
        buckets=Buckets.of(SPLITS, 64, BucketLimits(1, 32, CAP + LONGEST_PROMPT)),
    )

    def evened(self, machine: Machine) -> RolloutReport:
        planner = CostModelPlanner((DP8,), machine.truth, self.lengths)
        return replay(self.workload, planner, machine)

    def test_long_sequences_of_one_group_are_spread(self):
        """One to a group from then on."""
        fixed, even = (
            replay(self.workload, FixedLayout(DP8), self.machine),
            self.evened(self.machine),
        )
        (done,) = even.balanced
        assert (done.step, done.sequences, done.fullest) == (16, 7, (8, 1))
        # One at a time to each distance, 25 tokens each.
        assert done.seconds == pytest.approx(done.predicted_cost_s) == pytest.approx(7 * 25 * 1e-3)
        assert {burst.rows for burst in even.bursts if burst.running == 8} == {1}
        assert {burst.rows for burst in fixed.bursts if burst.running == 8} == {8}
        assert even.trace.total_steps == fixed.trace.total_steps
        assert even.total_s == pytest.approx(even.spent("prefill", "decode", "balance"))
        assert even.balance_share == pytest.approx(done.seconds / even.total_s)
        assert fixed.balance_share == 0
        saved = fixed.total_s - even.total_s + done.seconds
        assert saved == pytest.approx(104 * 7 * 0.1, rel=0.2) and saved > 5

    @pytest.mark.parametrize(
        "reads, shift, moves", [("held", 1e-4, 1), ("bucket", 1e-4, 0), ("held", 1.0, 0)]
    )
    def test_within_a_row_bucket_groups_are_evened_where_steps_read_what_is_held(
        self, reads, shift, moves
    ):
        """Each group of one to eight in eight rows."""
        machine = make_machine(per_row=0.1, shift_per_token=shift, reads=reads)
        one_bucket = {
            split: tuple(n for n in x if n >= 8) for split, x in self.machine.buckets.rows.items()
        }
        buckets = replace(self.machine.buckets, rows=one_bucket)
        truth = replace(machine.truth.on(one_bucket, buckets.lengths), reads=reads)
        machine = replace(machine, buckets=buckets, truth=truth)
        even = self.evened(machine)
        found = [(move.fullest, move.sequences) for move in even.balanced]
        assert found == [((8, 1), 7)] * moves
        fixed = replay(self.workload, FixedLayout(DP8), machine)
        assert (even.total_s < fixed.total_s) == bool(moves)

    @pytest.mark.parametrize("room", [1, 2])
    def test_the_planner_hears_whether_all_went(self, room):
        """Two are to go to a group that has pages for one of them, or for both."""
        scheduler, heard = waiting(self.workload, self.machine, DP8), []
        pool, tables = scheduler.cache_manager.tables.pools[1], scheduler.cache_manager.tables

        class Asks(FixedLayout):
            taken: np.ndarray | None = None

            def decide(self, load: Load, current: Split, options=()) -> Plan:
                plan = super().decide(load, current, options)
                if load.running > 8 or heard:
                    return plan
                first, second, *_ = tables.count[scheduler.table.running]
                due = first + second * (room == 2)
                object.__setattr__(self, "taken", pool.take(pool.num_free - due))
                return replace(plan, replica=np.repeat([1, 0], [2, 6]))

            def observe(self, outcome) -> None:
                if isinstance(outcome, Moved):
                    heard.append(outcome.is_whole)
                    assert self.taken is not None
                    pool.release(self.taken)

        report, planner = RolloutReport(), Asks(DP8)
        executor = SimulatedExecutor(self.workload, self.machine, tables, DP8)
        for _ in rollout(scheduler, executor, planner, report):
            scheduler.check_integrity()
        (move,) = report.balanced
        assert heard == [room == 2]
        assert (move.sequences, move.fullest) == (room, (8, 8 - room))
        assert report.prefill_tokens == 64 * 9 and report.tokens == self.workload.responses.sum()

    @settings(max_examples=20)
    @given(workloads, st.floats(1e-4, 1.0), st.sampled_from(SPLITS[:3]))
    def test_each_one_empties_the_fullest_group_and_is_paid(self, workload, shift_per_token, split):
        machine = make_machine(per_row=0.1, shift_per_token=shift_per_token)
        fixed = replay(workload, FixedLayout(split), machine)
        planner = CostModelPlanner((split,), machine.truth, self.lengths)
        even = replay(workload, planner, machine)
        assert even.total_s == pytest.approx(even.spent("prefill", "decode", "balance"))
        assert even.trace.total_steps == fixed.trace.total_steps
        assert all(balance.fullest[1] < balance.fullest[0] for balance in even.balanced)
        assert len(even.balanced) <= len(machine.buckets.rows[split])
        assert all(b.predicted_saving_s > 1.2 * b.predicted_cost_s for b in even.balanced)

    @pytest.mark.parametrize("scarce", [0, 9])
    @settings(max_examples=25)
    @given(workload=grouped, split=st.sampled_from(SPLITS[:3]), more=st.integers(0, 18))
    def test_they_empty_a_bucket(self, scarce, workload, split, more):
        """Also where pages are scarce and sequences give theirs up."""
        machine = replace(make_machine(per_row=0.1, shift_per_token=0.01), splits=(split,))
        pooled = with_pools(machine, 13 + scarce + more * (scarce > 0))
        planner = CostModelPlanner((split,), machine.truth, self.lengths, memory=pooled.memory)
        for move in replay(workload, planner, pooled if scarce else machine).balanced:
            assert move.fullest[1] < move.fullest[0] and move.sequences > 0
