"""The simulator against the engine's own rules, against plain sums, and against hindsight."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations

import numpy as np
import pytest
from fakes import SPLITS, made_up_machine
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_jax.config import RolloutConfig
from pat_jax.engine.buckets import Buckets
from pat_jax.planning.lengths import LengthModel
from pat_jax.planning.memory import MemoryModel
from pat_jax.planning.planner import CostModelPlanner, Planner
from pat_jax.planning.scripts import FixedLayout, ScriptedPath, Step
from pat_jax.planning.types import (
    MIGRATE_ALL,
    RECOMPUTE_ALL,
    Balance,
    Load,
    Plan,
    Split,
    recompute_below,
)
from pat_jax.profiling.hindsight import clairvoyant
from pat_jax.profiling.machine import Machine, Replay, Workload
from pat_jax.profiling.regret import regret
from pat_jax.profiling.simulator import replay

DP8, DP4TP2, DP2TP4, TP8 = SPLITS
CAP, LONGEST_PROMPT, CAPACITY = 150, 20, 40
CONFIG = replace(
    RolloutConfig(),
    max_prompt_length=LONGEST_PROMPT,
    max_completion_length=CAP,
    min_rows=1,
    min_length=32,
    burst_steps=32,
)


def make_machine(
    step=(0.5, 0.4, 0.3, 0.25),
    per_row=0.02,
    reslice=0.2,
    migrate_per_token=1e-3,
    prefill=1.0,
    **costs: float | None,
) -> Machine:
    return made_up_machine(
        CONFIG,
        CAPACITY,
        (32, 64, 128, 192),
        step,
        per_row=per_row,
        reslice=reslice,
        migrate_per_token=migrate_per_token,
        prefill=prefill,
        **costs,
    )


MACHINE = make_machine()


def make_workload(seed: int, size: int = 32) -> Workload:
    rng = np.random.default_rng(seed)
    responses = np.clip(rng.lognormal(3, 1, size).astype(int), 1, CAP)
    return Workload(rng.integers(1, LONGEST_PROMPT + 1, size), responses, CAP)


workloads = st.builds(make_workload, st.integers(0, 10_000), st.integers(1, CAPACITY))
machines = st.builds(
    make_machine,
    st.tuples(*[st.floats(0.05, 1.0)] * 4),
    st.floats(0, 0.1),
    st.floats(0, 5),
    st.floats(0, 0.01),
    st.floats(0.01, 3),
    shift_per_token=st.none() | st.floats(1e-4, 1.0),
)


def static_seconds(workload: Workload, split: Split, machine: Machine = MACHINE) -> float:
    """Step by step: the fullest group's live rows in their bucket, the longest cache in its own."""
    buckets, latency = machine.buckets, machine.truth
    per_group = -(-workload.size // split.dp)
    group = np.arange(workload.size) // per_group
    total = latency.recompute(split, per_group, int(workload.prompts.max()))
    for step in range(0, int(workload.responses.max()), machine.check_every):
        is_live = workload.responses > step
        fullest = int(np.bincount(group[is_live]).max())
        needed = min(
            int((workload.prompts + workload.cap)[is_live].max()) - 1,
            int(workload.prompts[is_live].max()) + step - 1 + machine.check_every,
        )
        length = buckets.length_for(needed)
        rows = buckets.rows_for(split, fullest)
        total += machine.check_every * latency.decode_step(split, rows, length)
    return total


@given(workloads, st.sampled_from(SPLITS))
def test_a_static_replay_is_the_sum_of_table_entries(workload, split):
    """In bursts of one check; longer ones stay in their buckets until they end."""
    done = replay(workload, FixedLayout(split), in_short_bursts(MACHINE))
    assert done.total_s == pytest.approx(static_seconds(workload, split))
    for one in (done, replay(workload, FixedLayout(split), MACHINE)):
        assert one.total_s == pytest.approx(one.prefill_s + one.decode_s)
        assert one.total_s >= static_seconds(workload, split) * (1 - 1e-9)
        assert (one.switch_s, one.path) == (0.0, [(0, str(split))])


@given(workloads, st.sampled_from(SPLITS))
def test_every_sequence_runs_to_its_end(workload, split):
    done = replay(workload, FixedLayout(split), MACHINE)
    every = MACHINE.check_every
    assert done.trace.total_steps == -(-int(workload.responses.max()) // every) * every
    steps = np.array(done.trace.steps)
    expected = (workload.responses[None, :] > steps[:, None]).sum(axis=1)
    np.testing.assert_array_equal(done.trace.live, expected)
    assert all(burst.steps <= MACHINE.burst_steps for burst in done.bursts)


@dataclass
class AtSteps(Planner):
    """Switches at given decode steps, whatever is live."""

    first: Split
    switches: tuple[tuple[int, Split], ...]
    recompute_below: int = MIGRATE_ALL

    def start(self, load: Load) -> Split:
        return self.first

    def plan(self, load: Load, current: Split) -> Plan:
        step = int(load.generated.max())
        due = [split for at, split in self.switches if at <= step]
        split = due[-1] if due else self.first
        return Plan(split, threshold=0, recompute_below=self.recompute_below)


@dataclass
class Restless(AtSteps):
    """Moves sequences between the groups of a layout wherever it may, to what it drew of the options."""

    drawn: int = 0

    def balance(self, load: Load, plan: Plan, options: Sequence[np.ndarray]) -> Balance | None:
        return Balance(options[self.drawn % len(options)]) if options else None


def in_short_bursts(machine: Machine) -> Machine:
    return replace(machine, burst_steps=machine.check_every)


class TestSwitches:
    @pytest.mark.parametrize("carry", ["migrate", "recompute"])
    @pytest.mark.parametrize("source, target", list(permutations(SPLITS, 2)), ids=str)
    def test_a_switch_costs_its_weights_and_its_cache(self, source, target, carry):
        workload = Workload(np.full(32, 10), np.full(32, 100), CAP)
        planner = AtSteps(source, ((64, target),), recompute_below(carry))
        done = replay(workload, planner, in_short_bursts(MACHINE))
        (switch,), truth = done.trace.switches, MACHINE.truth
        # 32 sequences in full buckets: 73 tokens of context in a cache of 128.
        kv = (
            truth.migrate(source, target, 32 // source.dp, 32, 73)
            if carry == "migrate"
            else truth.recompute(target, 32 // target.dp, 73)
        )
        assert switch.seconds == pytest.approx(truth.reslice(source, target) + kv)
        assert (switch.step, switch.live, switch.kv) == (64, 32, carry)
        assert done.switch_s == switch.seconds
        # 64 steps in one layout and 40 in the other (36 to the end, in whole checks).
        decode = [(s.split, s.rows, s.length, s.steps) for s in done.bursts]
        assert sum(n for split, *_, n in decode if split == source) == 64
        assert sum(n for split, *_, n in decode if split == target) == 40
        assert {(split, rows) for split, rows, *_ in decode} == {
            (source, 32 // source.dp),
            (target, 32 // target.dp),
        }

    @pytest.mark.parametrize("live, step", [(24, 16), (20, 32), (4, 56)])
    def test_a_threshold_ends_a_burst_within_one_check(self, live, step):
        """Rows of TP8 are compacted at 16 live and below: 24 and 20 are the planner's alone."""
        responses = np.repeat([10, 30, 50, 100], [8, 4, 16, 4])
        workload = Workload(np.full(32, 5), responses, CAP)
        long_bursts = replace(MACHINE, burst_steps=128, buckets=one_length(MACHINE.buckets))
        done = replay(workload, ScriptedPath(TP8, (Step(DP8, live),)), long_bursts)
        assert [(s.step, s.live) for s in done.trace.switches] == [(step, live)]


def one_length(buckets: Buckets) -> Buckets:
    """A cache that never has to grow, which would end a burst as well."""
    return replace(buckets, lengths=buckets.lengths[-1:])


class TestHindsight:
    @given(workloads, st.sampled_from(SPLITS))
    def test_without_a_choice_it_is_the_static_replay(self, workload, split):
        alone = Machine.of(MACHINE.truth, (split,), CONFIG, capacity=CAPACITY)
        best = clairvoyant(workload, alone)
        assert best.total_s == pytest.approx(static_seconds(workload, split, alone))
        assert (best.start, best.switches) == (split, ())

    @settings(max_examples=40)
    @given(workloads, machines, st.data())
    def test_no_planner_is_faster(self, workload, machine, data):
        best = clairvoyant(workload, machine).total_s
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

    @settings(max_examples=40)
    @given(workloads, machines)
    def test_its_path_costs_what_it_says(self, workload, machine):
        best = clairvoyant(workload, machine)
        planner = AtSteps(best.start, best.switches)
        done = replay(workload, planner, in_short_bursts(machine))
        if best.is_exact:
            assert done.total_s == pytest.approx(best.total_s)
        else:
            assert done.total_s >= best.total_s * (1 - 1e-9)

    def test_it_switches_when_that_pays(self):
        """0.5 s against 0.25 s a step for 100 steps, and 0.25 s for the switch."""
        workload = Workload(np.full(8, 5), np.array([100, *[8] * 7]), CAP)
        machine = make_machine((0.5, 9.0, 9.0, 0.25), per_row=0.05)
        best = clairvoyant(workload, machine)
        assert (best.start, best.switches, best.is_exact) == (DP8, ((8, TP8),), True)
        assert best.total_s < static_seconds(workload, DP8, machine)
        assert best.total_s < static_seconds(workload, TP8, machine)


def test_lengths_beyond_the_cap_are_refused():
    with pytest.raises(ValueError, match="must lie in 1 … 150, the cap"):
        Workload(np.full(2, 5), np.array([3, CAP + 1]), CAP)


def test_a_planner_sees_loads_and_steps_but_no_future():
    seen = []

    @dataclass
    class Watching(AtSteps):
        def plan(self, load: Load, current: Split) -> Plan:
            seen.append(load)
            return super().plan(load, current)

        def observe(self, split: Split, rows: int, length: int, seconds: float) -> None:
            seen.append((split, rows, length, seconds))

    workload = make_workload(3)
    replay(workload, Watching(DP8, ((64, TP8),)), MACHINE)
    loads, steps = seen[::2], seen[1::2]
    assert all(load.live == (workload.responses > load.generated[0]).sum() for load in loads)
    assert all((load.generated + load.budget == CAP).all() for load in loads)
    assert {split for split, *_ in steps} == {DP8, TP8}
    assert all(
        seconds == pytest.approx(MACHINE.truth.decode_step(split, rows, length))
        for split, rows, length, seconds in steps
    )


@dataclass
class Noting(CostModelPlanner):
    """Notes how many sequences waited when it switched; `is_blind` to those that wait."""

    is_blind: bool = False
    switched: list[tuple[Split, int]] = field(default_factory=list)

    def start(self, load: Load) -> Split:
        return super().start(replace(load, waiting=0) if self.is_blind else load)

    def plan(self, load: Load, current: Split) -> Plan:
        plan = super().plan(replace(load, waiting=0) if self.is_blind else load, current)
        if plan.split != current:
            self.switched.append((plan.split, load.waiting))
        return plan


class TestQueue:
    """Four times as many sequences as rows."""

    workload = make_workload(5, 4 * CAPACITY)

    @pytest.mark.parametrize("split", SPLITS, ids=str)
    def test_every_sequence_gets_a_row(self, split):
        done = replay(self.workload, FixedLayout(split), MACHINE)
        live = np.array(done.trace.live)
        assert live.max() == live[0] == CAPACITY
        assert len(done.trace.done_after) == self.workload.size
        # All rows have work until the queue is empty.
        assert done.trace.total_steps < self.workload.responses.sum() / CAPACITY + 2 * CAP
        assert done.total_s == pytest.approx(done.prefill_s + done.decode_s)

    def test_nobody_is_in_the_layout_of_the_tail_while_sequences_wait(self):
        """Full, DP8 is a little faster; who sees a tail only begins where it will end."""
        step = (0.5, 9.0, 9.0, 0.1)
        machine = make_machine(step, per_row=0.006, reslice=5.0, prefill=0.05)
        seen = make_workload(6, 2000).responses
        lengths = LengthModel.empty(CAP).updated(seen, seen == CAP)
        seeing = Noting((DP8, TP8), machine.truth, lengths)
        blind = replace(seeing, is_blind=True, switched=[])
        best, other = (replay(self.workload, planner, machine) for planner in (seeing, blind))
        assert best.path[0] == (0, "dp8tp1") and seeing.switched == [(TP8, 0)]
        assert other.path[0] == (0, "dp1tp8") and other.total_s > 1.05 * best.total_s


class TestBalance:
    """A planner with one layout: nothing but moves between its groups is left to decide."""

    lengths = LengthModel.empty(CAP)

    # Eight of the first group run on alone.
    workload = Workload(np.full(64, 10), np.where(np.arange(64) < 8, 120, 16), CAP)
    machine = replace(
        make_machine(per_row=0.1, shift_per_token=1e-3),
        buckets=Buckets.build(
            SPLITS, capacity=64, min_rows=1, min_length=32, max_length=CAP + LONGEST_PROMPT
        ),
    )

    def evened(self, machine: Machine) -> Replay:
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
        assert done.seconds == done.predicted_cost_s == pytest.approx(7 * 25 * 1e-3)
        assert {burst.rows for burst in even.bursts if burst.live == 8} == {1}
        assert {burst.rows for burst in fixed.bursts if burst.live == 8} == {8}
        assert even.trace.total_steps == fixed.trace.total_steps
        assert even.total_s == pytest.approx(even.prefill_s + even.decode_s + even.balance_s)
        saved = fixed.total_s - even.total_s + done.seconds
        assert saved == pytest.approx(104 * 7 * 0.1, rel=0.2) and saved > 5

    def test_hindsight_spreads_them_too(self):
        machine = in_short_bursts(replace(self.machine, splits=(DP8,)))
        best, even = clairvoyant(self.workload, machine), self.evened(machine)
        assert (best.evened, best.switches, best.is_exact) == ((16,), (), False)
        # It takes no more for granted than that four of the eight have to leave the first group.
        assert best.total_s == pytest.approx(even.prefill_s + even.decode_s + 4 * 25 * 1e-3)
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
        assert even.total_s == pytest.approx(even.prefill_s + even.decode_s + even.balance_s)
        assert even.trace.total_steps == fixed.trace.total_steps
        assert all(balance.fullest[1] < balance.fullest[0] for balance in even.trace.balanced)
        assert len(even.trace.balanced) <= len(machine.buckets.rows[split])
        assert all(b.predicted_saving_s > 1.2 * b.predicted_cost_s for b in even.trace.balanced)


def with_pools(machine: Machine, pages: int) -> Machine:
    """Pages of 16 tokens, so many where KV heads are not split."""
    memory = MemoryModel(
        limit=1e9,
        resident=0,
        weights=dict.fromkeys(SPLITS, 1),
        page={split: 8 // split.tp for split in SPLITS},
        pages={split: pages * split.tp for split in SPLITS},
        page_size=16,
        chunk=1,
        staging=1,
        ahead=machine.check_every,
    )
    return replace(machine, memory=memory, has_pools=True)


class TestPools:
    @settings(deadline=None)
    @given(workloads, st.sampled_from(SPLITS))
    def test_where_everything_fits_they_make_no_difference(self, workload, split):
        free = replay(workload, FixedLayout(split), MACHINE)
        pooled = replay(workload, FixedLayout(split), with_pools(MACHINE, 1000))
        assert pooled.num_preempted == 0
        # Who is in which group may differ: the engine deals out by free pages.
        assert pooled.trace.total_steps == free.trace.total_steps
        assert pooled.trace.done_after == free.trace.done_after
        if split.dp == 1:
            assert pooled == free

    @settings(deadline=None, max_examples=40)
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
                done.prefill_s + done.decode_s + done.switch_s + done.balance_s
            )
            # Every token is said in some step of a burst in which its sequence was live.
            said = sum(burst.live * burst.steps for burst in done.bursts)
            assert said >= workload.responses.sum()

    def test_who_gives_way_is_computed_again(self):
        """Two sequences of 160 tokens in twelve pages of 16: one of them waits for the other."""
        workload = Workload(np.full(2, 10), np.full(2, 150), CAP)
        short = in_short_bursts(with_pools(MACHINE, 12))
        assert short.memory is not None
        alone = replace(short, splits=(TP8,), memory=replace(short.memory, pages={TP8: 12}))
        done = replay(workload, FixedLayout(TP8), alone)
        assert done.num_preempted == 1
        assert max(burst.live for burst in done.bursts) == 2
        assert {burst.live for burst in done.bursts[-4:]} == {1}
        roomy = replay(workload, FixedLayout(TP8), in_short_bursts(with_pools(MACHINE, 100)))
        assert done.trace.total_steps > 1.4 * roomy.trace.total_steps
        assert done.prefill_s > roomy.prefill_s


def test_a_prompt_is_prefilled_once_for_all_its_samples():
    prompts, responses = np.full(32, 20), np.full(32, 30)
    strangers = replay(Workload(prompts, responses, CAP), FixedLayout(TP8), MACHINE)
    siblings = Workload(prompts, responses, CAP, np.repeat(np.arange(8), 4))
    once = replay(siblings, FixedLayout(TP8), MACHINE)
    truth = MACHINE.truth
    assert strangers.prefill_s == truth.recompute(TP8, 32, 20)
    assert once.prefill_s == truth.recompute(TP8, 8, 20) < strangers.prefill_s
    assert once.decode_s == strangers.decode_s


def test_the_hosts_time_is_charged_for_every_live_sequence():
    workload = make_workload(4)
    plain = replay(workload, FixedLayout(DP2TP4), MACHINE)
    host = replace(MACHINE, host_s_per_sequence=0.001)
    busy = replay(workload, FixedLayout(DP2TP4), host)
    more = 0.001 * sum(burst.live * burst.steps for burst in plain.bursts)
    assert busy.total_s - plain.total_s == pytest.approx(more)
    alone = replace(host, splits=(DP2TP4,))
    assert clairvoyant(workload, alone).total_s <= busy.total_s * (1 + 1e-9)


@settings(deadline=None, max_examples=25)
@given(workloads, machines, st.integers(0, 3))
def test_regret_is_that_of_the_path_that_was_taken(workload, machine, start):
    fixed = replay(workload, FixedLayout(SPLITS[start]), machine)
    best = clairvoyant(workload, machine).total_s
    assert regret(workload, machine, fixed.trace) == pytest.approx(fixed.total_s / best - 1)
    later = SPLITS[start:][-1]
    script = ScriptedPath(SPLITS[0], (Step(later, workload.size // 3),) if start else ())
    moved = replay(workload, script, machine)
    assert regret(workload, machine, moved.trace) == pytest.approx(moved.total_s / best - 1)
    assert regret(workload, machine, moved.trace) >= -1e-9
    planner = CostModelPlanner(SPLITS, machine.truth, LengthModel.empty(CAP))
    planned = replay(workload, planner, machine)
    assert regret(workload, machine, planned.trace) >= -1e-9
