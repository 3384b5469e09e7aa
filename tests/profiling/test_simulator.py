"""The simulator against the engine's own rules and against plain sums."""

from dataclasses import dataclass, field, replace
from itertools import permutations

import numpy as np
import pytest
import replays
from fakes import SPLITS, made_up_machine
from hypothesis import given
from hypothesis import strategies as st
from replays import (
    CAP,
    CAPACITY,
    MACHINE,
    AtSteps,
    grouped,
    in_short_bursts,
    make_machine,
    make_workload,
    prefill_seconds,
    static_seconds,
)

from pat_jax.layout.buckets import Buckets
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.planning.planner.scripts import FixedLayout, ScriptedPath, Step
from pat_jax.planning.types import Load, Plan, Split, recompute_below
from pat_jax.profiling.capacity.planned import of_tail
from pat_jax.profiling.simulate.comparison import Comparison, Series, compare
from pat_jax.profiling.simulate.draw import Draw
from pat_jax.profiling.simulate.machine import Workload
from pat_jax.profiling.simulate.response_lengths import ResponseLengths
from pat_jax.profiling.simulate.simulator import replay

DP8, DP4TP2, DP2TP4, TP8 = SPLITS


@pytest.mark.parametrize("reads", ["bucket", "held"])
@given(grouped, st.sampled_from(SPLITS))
def test_a_static_replay_is_the_sum_of_table_entries(reads, workload, split):
    """In bursts of one check; longer ones stay in their buckets until they end."""
    made = make_machine(reads=reads)
    short = in_short_bursts(made)
    done = replay(workload, FixedLayout(split), short)
    assert done.total_s == pytest.approx(static_seconds(workload, split, short))
    for machine in (short, made):
        one = replay(workload, FixedLayout(split), machine)
        assert one.total_s == pytest.approx(one.spent("prefill", "decode"))
        assert one.total_s >= static_seconds(workload, split, machine) * (1 - 1e-9)
        assert (one.spent("switch"), one.trace.path) == (0.0, [str(split)])


@given(grouped, st.sampled_from(SPLITS))
def test_every_sequence_runs_to_its_end(workload, split):
    done = replay(workload, FixedLayout(split), MACHINE)
    every = MACHINE.check_every
    assert done.trace.total_steps == -(-int(workload.responses.max()) // every) * every
    steps = np.array(done.trace.steps)
    expected = (workload.responses[None, :] > steps[:, None]).sum(axis=1)
    np.testing.assert_array_equal(done.trace.running, expected)
    assert all(burst.steps <= MACHINE.burst_steps for burst in done.bursts)


class TestSwitches:
    @pytest.mark.parametrize("carry", ["migrate", "recompute"])
    @pytest.mark.parametrize("source, target", list(permutations(SPLITS, 2)), ids=str)
    def test_a_switch_costs_its_weights_and_its_cache(self, source, target, carry):
        workload = Workload(np.full(32, 10), np.full(32, 100), CAP)
        planner = AtSteps(source, ((64, target),), recompute_below(carry))
        done = replay(workload, planner, in_short_bursts(MACHINE))
        (switch,), truth = done.trace.switches, MACHINE.truth
        assert switch.sent is None  # a replay moves none, which is not the same as zero
        # 32 sequences in full buckets: 73 tokens of context in a cache of 128.
        kv = (
            truth.migrate(source, target, 32 // source.dp, 32, 73)
            if carry == "migrate"
            else truth.recompute(target, 32 // target.dp, 73)
        )
        assert switch.seconds == pytest.approx(truth.reshard_table[source, target] + kv)
        assert (switch.step, switch.running, switch.kv) == (64, 32, carry)
        assert done.spent("switch") == switch.seconds
        # 64 steps in one layout and 40 in the other (36 to the end, in whole checks).
        decode = [(s.split, s.rows, s.length, s.steps) for s in done.bursts]
        assert sum(n for split, *_, n in decode if split == source) == 64
        assert sum(n for split, *_, n in decode if split == target) == 40
        assert {(split, rows) for split, rows, *_ in decode} == {
            (source, 32 // source.dp),
            (target, 32 // target.dp),
        }

    @pytest.mark.parametrize("short, carry", [(0, "recompute"), (8, "mixed"), (32, "migrate")])
    def test_what_has_nothing_to_compute_is_not_recomputed(self, short, carry):
        """Before the first step: of a prompt of one token no cache is left behind."""
        prompts = np.repeat([1, 10], [short, 32 - short])
        planner = AtSteps(DP8, ((0, TP8),), recompute_below("recompute"))
        done = replay(Workload(prompts, np.full(32, 20), CAP), planner, MACHINE)
        assert [(switch.running, switch.kv) for switch in done.switches] == [(32, carry)]

    @pytest.mark.parametrize("running, step", [(24, 16), (20, 32), (4, 56)])
    def test_a_threshold_ends_a_burst_within_one_check(self, running, step):
        """Rows of TP8 are compacted at 16 running and below: 24 and 20 are the planner's alone."""
        responses = np.repeat([10, 30, 50, 100], [8, 4, 16, 4])
        workload = Workload(np.full(32, 5), responses, CAP)
        long_bursts = replace(MACHINE, burst_steps=128, buckets=one_length(MACHINE.buckets))
        done = replay(workload, ScriptedPath(TP8, (Step(DP8, running),)), long_bursts)
        assert [(s.step, s.running) for s in done.trace.switches] == [(step, running)]


def one_length(buckets: Buckets) -> Buckets:
    """A cache that never has to grow, which would end a burst as well."""
    return replace(buckets, lengths=buckets.lengths[-1:])


def test_lengths_beyond_the_cap_are_refused():
    with pytest.raises(ValueError, match="must lie in 1 … 150, the cap"):
        Workload(np.full(2, 5), np.array([3, CAP + 1]), CAP)


@dataclass
class Noting(CostModelPlanner):
    """Notes how many sequences waited when it switched; `is_blind` to those that wait."""

    is_blind: bool = False
    switched: list[tuple[Split, int]] = field(default_factory=list)

    def start(self, load: Load) -> Split:
        return super().start(replace(load, waiting=0) if self.is_blind else load)

    def decide(self, load: Load, current: Split, options=()) -> Plan:
        plan = super().decide(replace(load, waiting=0) if self.is_blind else load, current)
        if plan.split != current:
            self.switched.append((plan.split, load.waiting))
        return plan


class TestQueue:
    """Four times as many sequences as rows."""

    workload = make_workload(5, 4 * CAPACITY)

    @pytest.mark.parametrize("split", [DP8, TP8], ids=str)
    def test_every_sequence_gets_a_row(self, split):
        done = replay(self.workload, FixedLayout(split), MACHINE)
        running = np.array(done.trace.running)
        assert running.max() == running[0] == CAPACITY
        assert len(done.trace.done_after) == self.workload.size
        # All rows have work until the queue is empty.
        assert done.trace.total_steps < self.workload.responses.sum() / CAPACITY + 2 * CAP
        assert done.total_s == pytest.approx(done.spent("prefill", "decode"))

    def test_nobody_is_in_the_layout_of_the_tail_while_sequences_wait(self):
        """Full, DP8 is a little faster; who sees a tail only begins where it will end."""
        step = (0.5, 9.0, 9.0, 0.1)
        machine = make_machine(step, per_row=0.006, reshard=5.0, prefill=0.05)
        seen = make_workload(6, 2000).responses
        lengths = LengthModel.empty(CAP).updated(seen, seen == CAP)
        seeing = Noting((DP8, TP8), machine.truth, lengths)
        blind = replace(seeing, is_blind=True, switched=[])
        best, other = (replay(self.workload, planner, machine) for planner in (seeing, blind))
        assert best.trace.path[0] == "dp8tp1" and seeing.switched == [(TP8, 0)]
        assert other.trace.path[0] == "dp1tp8" and other.total_s > 1.05 * best.total_s


def test_a_prompt_is_prefilled_once_for_all_its_samples():
    prompts, responses = np.full(32, 20), np.full(32, 30)
    strangers = Workload(prompts, responses, CAP)
    one = replay(strangers, FixedLayout(TP8), MACHINE)
    siblings = Workload(prompts, responses, CAP, np.repeat(np.arange(8), 4))
    once = replay(siblings, FixedLayout(TP8), MACHINE)
    for workload, done, pages in ((strangers, one, 32 * 2), (siblings, once, 8 * 2)):
        calls = -(-pages // MACHINE.truth.prefill_blocks)
        seconds = prefill_seconds(workload, TP8, np.zeros(32, int))
        assert done.spent("prefill") == pytest.approx(seconds) == pytest.approx(calls)
    assert once.spent("decode") == one.spent("decode")


def test_the_hosts_time_is_charged_for_every_live_sequence():
    workload = make_workload(4)
    plain = replay(workload, FixedLayout(DP2TP4), MACHINE)
    host = replace(MACHINE, host_s_per_sequence=0.001)
    busy = replay(workload, FixedLayout(DP2TP4), host)
    more = 0.001 * sum(burst.running * burst.steps for burst in plain.bursts)
    assert busy.total_s - plain.total_s == pytest.approx(more)


LONGEST, PROMPT, SEQUENCES = 150, 10, 64
SHORT_PROMPTS = replace(replays.CONFIG, max_prompt_length=PROMPT)
EVEN_MACHINE = made_up_machine(
    SHORT_PROMPTS,
    SEQUENCES,
    (32, 64, 128, 160),
    (0.5, 0.4, 0.3, 0.25),
    per_row=0.05,
    reshard=0.2,
    migrate_per_token=1e-3,
)
TAIL = ResponseLengths("mine", np.array([8, 150]), np.array([15.0, 1.0]))
SERIES = Series(Draw(SEQUENCES, LONGEST, 8, prompt_tokens=PROMPT), rollouts=2)


@pytest.fixture(scope="module")
def found() -> Comparison:
    return compare(EVEN_MACHINE, TAIL, SERIES)


def test_the_time_of_a_rollout_is_that_of_its_parts(found: Comparison):
    for system in (found.adaptive, *found.static):
        parts = zip(system.prefill_s, system.decode_s, system.switch_s, strict=True)
        assert [sum(part) for part in parts] == pytest.approx(system.total_s)
        assert system.num_preempted == (0, 0)
    assert [system.name for system in found.static] == [str(split) for split in SPLITS]
    assert sum(found.adaptive.switch_s) > 0
    responses = [SERIES.workload(TAIL, n).responses for n in range(2)]
    assert found.tokens == tuple(int(lengths.sum()) for lengths in responses)
    assert found.longest == tuple(int(lengths.max()) for lengths in responses)


def test_gains_are_those_of_the_times(found: Comparison):
    best = found.best_static
    assert best.mean_s == min(system.mean_s for system in found.static)
    assert found.gain(best) == pytest.approx(1 - found.adaptive.mean_s / best.mean_s)
    assert found.gain(found.adaptive) == 0
    for trace in found.traces:  # a switch begins when a burst has ended
        assert trace.switches[0].at_s <= trace.total_s


def test_the_host_takes_its_time_for_every_sequence(found: Comparison):
    slow = compare(replace(EVEN_MACHINE, host_s_per_sequence=0.01), TAIL, SERIES)
    responses = np.concatenate([SERIES.workload(TAIL, n).responses for n in range(2)])
    # Whole checks of eight steps for every sequence that is running when a burst begins.
    least = 0.01 * responses.sum()
    for slower, plain in zip(slow.static, found.static, strict=True):
        assert least <= sum(slower.total_s) - sum(plain.total_s) <= 6 * least


def test_what_limits_it_is_told(found: Comparison):
    alone = of_tail(found, EVEN_MACHINE)
    assert "150 steps" in alone and "dp1tp8" in alone


def test_where_no_switch_pays_there_is_none():
    dear = dict.fromkeys(EVEN_MACHINE.truth.reshard_table, 10000.0)
    machine = replace(EVEN_MACHINE, truth=replace(EVEN_MACHINE.truth, reshard_table=dear))
    found = compare(machine, TAIL, SERIES)
    assert not any(t.switches for t in found.traces)
