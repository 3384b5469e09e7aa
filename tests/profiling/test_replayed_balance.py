"""Moves between the groups of a layout in replays: what they save and cost, there and in hindsight."""

from dataclasses import replace

import numpy as np
import pytest
from fakes import SPLITS
from hypothesis import given, settings
from hypothesis import strategies as st
from replays import (
    CAP,
    LONGEST_PROMPT,
    grouped,
    in_short_bursts,
    make_machine,
    with_pools,
    workloads,
)

from pat_jax.engine.controller import Relocation
from pat_jax.engine.layout.buckets import Buckets
from pat_jax.engine.relocation.rounds import SIZES, Shift
from pat_jax.engine.report import RolloutReport
from pat_jax.engine.sequences.block_tables import BlockTables
from pat_jax.engine.sequences.page_allocator import NULL_PAGE
from pat_jax.engine.sequences.prefill_calls import PageMoves
from pat_jax.engine.sequences.sequence_table import SequenceTable
from pat_jax.engine.two_stages import FirstStage
from pat_jax.planning.latency.model import STAGES
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.planning.types import Balance, Ran, Relocated
from pat_jax.profiling.measure.regret import regret
from pat_jax.profiling.simulate.hindsight import clairvoyant
from pat_jax.profiling.simulate.machine import Machine, Workload
from pat_jax.profiling.simulate.simulated_executor import SimulatedExecutor
from pat_jax.profiling.simulate.simulator import replay

DP8 = SPLITS[0]


class TestBalance:
    """A planner with one layout: nothing but moves between its groups is left to decide."""

    lengths = LengthModel.empty(CAP)

    # Eight of the first group, to which every eighth is dealt, run on alone.
    workload = Workload(np.full(64, 10), np.where(np.arange(64) % 8 == 0, 120, 16), CAP)
    machine = replace(
        make_machine(per_row=0.1, shift_per_token=1e-3),
        buckets=Buckets.build(
            SPLITS, capacity=64, min_rows=1, min_length=32, max_length=CAP + LONGEST_PROMPT
        ),
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
        (done,) = even.trace.balanced
        assert (done.step, done.sequences, done.fullest) == (16, 7, (8, 1))
        # One at a time to each distance, 25 tokens each.
        assert done.seconds == pytest.approx(done.predicted_cost_s) == pytest.approx(7 * 25 * 1e-3)
        assert {burst.rows for burst in even.bursts if burst.live == 8} == {1}
        assert {burst.rows for burst in fixed.bursts if burst.live == 8} == {8}
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
        found = [(move.fullest, move.sequences) for move in even.trace.balanced]
        assert found == [((8, 1), 7)] * moves
        fixed = replay(self.workload, FixedLayout(DP8), machine)
        assert (even.total_s < fixed.total_s) == bool(moves)

    def test_hindsight_spreads_them_too(self):
        machine = in_short_bursts(replace(self.machine, splits=(DP8,)))
        best, even = clairvoyant(self.workload, machine), self.evened(machine)
        assert (best.evened, best.switches, best.is_exact) == ((16,), (), False)
        # It takes no more for granted than that four of the eight have to leave the first group.
        assert best.total_s == pytest.approx(even.spent("prefill", "decode") + 4 * 25 * 1e-3)
        migrate = {key: s for key, s in machine.truth.migrate_table.items() if key[0] != key[1]}
        unmoved = replace(machine, truth=replace(machine.truth, migrate_table=migrate))
        fixed = replay(self.workload, FixedLayout(DP8), unmoved)
        best = clairvoyant(self.workload, unmoved)
        assert (best.evened, best.total_s) == ((), pytest.approx(fixed.total_s))

    def test_regret_is_that_of_the_moves_that_were_made(self):
        even = self.evened(self.machine)
        best = clairvoyant(self.workload, self.machine).total_s
        found = regret(self.workload, self.machine, even.trace)
        assert found == pytest.approx(even.total_s / best - 1)
        unmoved = replace(even.trace, balanced=())
        assert regret(self.workload, self.machine, unmoved) > found + 0.1

    @settings(max_examples=50)
    @given(workloads, st.floats(1e-4, 1.0), st.sampled_from(SPLITS[:3]))
    def test_each_one_empties_the_fullest_group_and_is_paid(self, workload, shift_per_token, split):
        machine = make_machine(per_row=0.1, shift_per_token=shift_per_token)
        fixed = replay(workload, FixedLayout(split), machine)
        planner = CostModelPlanner((split,), machine.truth, self.lengths)
        even = replay(workload, planner, machine)
        assert even.total_s == pytest.approx(even.spent("prefill", "decode", "balance"))
        assert even.trace.total_steps == fixed.trace.total_steps
        assert all(balance.fullest[1] < balance.fullest[0] for balance in even.trace.balanced)
        assert len(even.trace.balanced) <= len(machine.buckets.rows[split])
        assert all(b.predicted_saving_s > 1.2 * b.predicted_cost_s for b in even.trace.balanced)

    def staged(self, send_rounds: int, shift_s: float = 0.1, per_row: float = 0.005) -> Machine:
        """A round has 32 pages of a token, and is slow on its way; memory holds so many."""
        machine = make_machine(per_row=per_row, shift_per_token=shift_s)
        stages = {(DP8, DP8, "packed"): 0.01, (DP8, DP8, "sent"): 0.08}
        table = {**machine.truth.migrate_table, **stages}
        truth = replace(machine.truth, migrate_table=table, page_size=1, round_tokens=SIZES[0])
        memory = with_pools(machine, 1).memory
        assert memory is not None
        memory = replace(memory, staging=2 * SIZES[0] * memory.page[DP8] * send_rounds)
        return replace(machine, truth=truth, memory=memory, buckets=self.machine.buckets)

    def test_pages_are_sent_while_all_decode_on(self):
        """Seven of 101 tokens leave for as many groups, in three rounds and a quarter each: all those of the
        first six are sent. What they say meanwhile, eight tokens, follows in a round each, as does the last one in four."""
        responses = np.where(np.arange(64) % 8 == 0, 90, 32)
        workload = Workload(np.full(64, 70), responses, CAP)
        at_once, staged = (
            replay(workload, CostModelPlanner((DP8,), machine.truth, self.lengths), machine)
            for machine in map(self.staged, (0, 20))
        )
        (one,), (two,) = at_once.trace.balanced, staged.trace.balanced
        assert (one.pages_sent, one.pages, one.step) == (0, 7 * 101, 32)
        assert one.seconds == pytest.approx(7 * 4 * 0.1)
        assert (two.sequences, two.fullest, two.step) == (7, (8, 1), 40)
        assert (two.pages, two.pages_sent) == (7 * (101 + 8), 6 * 101)
        assert two.steps_between == 8
        assert two.seconds == pytest.approx(6 * 3.25 * 0.01 + (6 + 4) * 0.1)
        assert staged.trace.total_steps == at_once.trace.total_steps
        assert staged.total_s == pytest.approx(staged.spent("prefill", "decode", "balance"))
        assert staged.spent("balance") == pytest.approx(two.seconds)
        # Groups are even eight steps later.
        even, uneven = at_once.bursts[1], staged.bursts[1]
        assert (even.rows, uneven.rows, uneven.steps) == (1, 8, 8)
        saved, later_s = at_once.total_s - staged.total_s, 8 * (uneven.step_s - even.step_s)
        assert saved == pytest.approx(one.seconds - two.seconds - later_s)
        assert saved > 0.5 and later_s > 0.2
        assert two.predicted_cost_s > two.seconds - 2 * 0.1

    @pytest.mark.parametrize("ends", [False, True])
    def test_what_the_planner_hears(self, ends):
        """Not of the burst beside which pages are sent; and whether all went that were to go."""
        responses = np.where(np.arange(64) % 8 == 0, 90, 32)
        # Of the first group, to which every eighth is dealt, the one before the last.
        responses[48] = 35 if ends else 90
        machine, heard = self.staged(20), []
        planner = CostModelPlanner((DP8,), machine.truth, self.lengths)
        observe = planner.observe
        planner.observe = lambda outcome: (heard.append(outcome), observe(outcome))[1]
        done = replay(Workload(np.full(64, 70), responses, CAP), planner, machine)
        (move,) = done.balanced
        assert (move.sequences, move.steps_between) == (6 if ends else 7, 8)
        ran = [one for one in heard if isinstance(one, Ran)]
        assert ran == [done.bursts[0], *done.bursts[2:]] and done.bursts[1].steps == 8
        (relocated,) = (one for one in heard if isinstance(one, Relocated))
        assert relocated.came == ("some" if ends else "all") and relocated.seconds == move.seconds
        assert len(planner.balance_costs.seen) == (not ends)

    def test_hindsight_takes_no_more_for_granted_than_what_is_packed(self):
        """Seven leave, in two stages, for less than four would take in one: as many as have to leave."""
        responses = np.where(np.arange(64) % 8 == 0, 90, 32)
        workload = Workload(np.full(64, 70), responses, CAP)
        machine = replace(self.staged(100, shift_s=0.4, per_row=0.03), splits=(DP8,))
        machine = in_short_bursts(machine)
        done = replay(workload, CostModelPlanner((DP8,), machine.truth, self.lengths), machine)
        (move,) = done.balanced
        assert move.steps_between > 0 and move.seconds < 4 * 4 * 0.4
        best = clairvoyant(workload, machine)
        assert best.evened == (32,) and best.total_s <= done.total_s

    def test_they_empty_a_bucket_and_hindsight_knows_of_them(self):
        """Also where pages are scarce, and sequences give theirs up between two stages; hindsight, which
        deals sequences out as if they were not, is held against those rollouts where they are not."""
        num_staged = []

        @settings(max_examples=200)
        @given(
            grouped,
            st.sampled_from(SPLITS[:3]),
            st.integers(1, 40),
            st.one_of(st.just(0), st.integers(1, 27)),
        )
        def example(workload, split, send_rounds, scarce):
            machine = make_machine(per_row=0.1, shift_per_token=3.0)
            stages = {(split, split, kind): 0.5 for kind in STAGES}
            table = {**machine.truth.migrate_table, **stages}
            truth = replace(machine.truth, migrate_table=table, round_tokens=SIZES[0])
            machine = with_pools(replace(machine, truth=truth, splits=(split,)), 13 + scarce)
            memory = machine.memory
            assert memory is not None
            memory = replace(memory, staging=2 * SIZES[0] * memory.page[split] * send_rounds)
            machine = replace(machine, memory=memory, has_pools=scarce > 0)
            planner = CostModelPlanner((split,), truth, self.lengths, memory=memory)
            done = replay(workload, planner, machine)
            for move in done.balanced:
                assert move.fullest[1] < move.fullest[0] and move.sequences > 0
                assert (move.pages_sent > 0) <= (move.steps_between > 0)
            num_staged.append(sum(move.steps_between > 0 for move in done.balanced))
            if not machine.has_pools:
                best = clairvoyant(workload, machine)
                assert best.total_s <= done.total_s * (1 + 1e-9)

        example()
        assert sum(num_staged) > 5

    def test_bursts_wait_for_what_is_on_its_way_for_longer_than_they_run(self):
        machine = self.staged(20)
        executor = SimulatedExecutor(np.ones(1, int), machine, tables_of(machine), DP8)
        empty = np.full((8, SIZES[0]), NULL_PAGE)
        executor.send([Shift(1, empty, empty)] * 3)
        assert executor.now_s == pytest.approx(3 * 0.01)
        none = PageMoves.of([])
        load = executor.table.load()
        stays, first = np.zeros(1, bool), FirstStage(Balance(load.group), 0, 1, 0)
        executor.relocate(
            Relocation(DP8, DP8, load, load.group, stays, none, np.zeros(0, bool), first)
        )
        assert executor.now_s == pytest.approx(3 * (0.01 + 0.08))


def tables_of(machine: Machine) -> BlockTables:
    """Of a single sequence."""
    table = SequenceTable(np.ones(1, int), np.full(1, 9), num_groups=8, rows_per_group=1)
    table.enter(np.zeros(1, int), np.zeros(1, int))
    return BlockTables(table, num_pages=20, page_size=machine.truth.page_size)
