"""When it pays to move sequences between groups: against what a step and a move really cost."""

from dataclasses import replace

import numpy as np
import pytest
from fakes import SPLITS
from hypothesis import given
from hypothesis import strategies as st
from made_up_machines import CAP, FASTER_WITH_TP, SLOWER_WITH_TP, lengths_of, machine
from made_up_memory import make_memory

from pat_jax.planning.latency.model import STAGES
from pat_jax.planning.memory import USABLE
from pat_jax.planning.planner.balance import balance_seconds
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.planning.types import (
    Balance,
    DraftPrediction,
    Load,
    Plan,
    Prediction,
    Relocated,
    SendLimits,
    Split,
)

DP8, DP4TP2, DP2TP4, TP8 = SPLITS
STAY = Plan(DP4TP2, threshold=0)
ROW_S = 2e-3  # of a step, each live row of the fullest group
GENERATED = 60
LEFT = CAP - GENERATED  # of every live sequence, as far as is known: 50 tokens or all of them
LENGTHS = lengths_of((50, 95), (CAP, 5))
GROUP = np.repeat(np.arange(4), [9, 3, 4, 2])
CONTEXT = np.where(np.arange(18) == 0, 5, 60)
ONE_STAGE, MANY = SendLimits(), SendLimits(100, 1, 1000)
ONE, FOUR = GROUP.copy(), GROUP.copy()
ONE[0], FOUR[:4] = 3, [3, 1, 3, 1]


def load(group: np.ndarray = GROUP, left: int = LEFT) -> Load:
    alike = np.ones(len(group), int)
    return Load(group, GENERATED * alike, CONTEXT[: len(group)], left * alike, step=GENERATED)


def make_planner(
    shift_per_token: float | None, *, row_s: float = ROW_S, step=SLOWER_WITH_TP, **options
) -> CostModelPlanner:
    latency = machine(step, per_row=row_s / 2, shift_per_token=shift_per_token, **options)
    planner = CostModelPlanner(SPLITS, latency, LENGTHS)
    planner.plan(load(), DP4TP2)
    return planner


def asked(
    planner: CostModelPlanner,
    *options: np.ndarray,
    plan: Plan = STAY,
    limits: SendLimits = ONE_STAGE,
) -> Balance | None:
    return planner.balance(load(), plan, options, limits)


def test_it_takes_what_gains_most():
    """One row less for 5 tokens, or four rows less for 185: a table entry of 64 to 512 tokens."""
    balance = asked(make_planner(1e-4), ONE, FOUR)
    assert balance is not None and (balance.group == FOUR).all()
    assert 4 * LEFT * ROW_S * 1.064 < balance.predicted_saving_s < 4 * LEFT * ROW_S * 1.512
    assert balance.predicted_cost_s == pytest.approx(1e-4 * 185)
    balance = asked(make_planner(0.05), ONE, FOUR)
    assert balance is not None and (balance.group == ONE).all()
    assert LEFT * ROW_S * 1.064 < balance.predicted_saving_s < LEFT * ROW_S * 1.512
    assert balance.predicted_cost_s == pytest.approx(0.05 * 5)
    assert "1 of 18 sequences, from 9 to 8" in balance.reason


def test_it_moves_nothing_for_nothing():
    assert asked(make_planner(1.0), ONE, FOUR) is None, "dearer than all it saves"
    assert asked(make_planner(1e-4, row_s=0.0), ONE, FOUR) is None, "no step is faster"
    assert asked(make_planner(None), ONE, FOUR) is None, "nobody knows what it costs"
    assert asked(make_planner(1e-4)) is None
    last = make_planner(1e-3).balance(load(left=1), STAY, [ONE, FOUR], ONE_STAGE)
    assert last is None, "one step to go"


def test_what_a_switch_will_merge_need_not_be_even():
    """All go to TP8 at the next moment: what is in one group then was even before."""
    planner = make_planner(0.05, step=FASTER_WITH_TP, reslice=1e-6)
    assert asked(planner, ONE) is not None
    assert asked(planner, ONE, plan=Plan(DP4TP2, threshold=8)) is None


def test_what_moves_took_is_believed():
    planner = make_planner(1e-3)
    first = asked(planner, FOUR)
    assert first is not None
    planner.observe(Relocated(first, 10 * first.predicted_cost_s))
    second = asked(planner, FOUR)
    assert second is not None
    assert 8 < second.predicted_cost_s / first.predicted_cost_s < 10
    assert second.predicted_saving_s == pytest.approx(first.predicted_saving_s)
    planner.observe(Relocated(second, 1e3 * first.predicted_cost_s))
    assert asked(planner, FOUR) is None


def test_a_frozen_planner_believes_its_profile():
    planner = make_planner(1e-3)
    planner.is_frozen = True
    first = asked(planner, FOUR)
    assert first is not None
    planner.observe(Relocated(first, 1e3 * first.predicted_cost_s))
    second = asked(planner, FOUR)
    assert second is not None and second.predicted_cost_s == first.predicted_cost_s


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30),
    st.integers(1, 50),
)
def test_pages_that_go_equally_far_go_together(moves, round_tokens):
    """Against the rounds counted one by one."""
    old, new = np.array(moves).T
    context = 1 + np.arange(len(old)) * 7 % 40
    seconds = 0.25
    latency = machine(SLOWER_WITH_TP, shift_per_token=seconds)
    latency = replace(latency, round_tokens=round_tokens)
    zeros = np.zeros(len(old), int)
    rounds = 0
    for distance in (1, 2, 3):
        due = [0] * 4
        for tokens, a, b in zip(context.tolist(), old.tolist(), new.tolist(), strict=True):
            due[a] += tokens * ((b - a) % 4 == distance)
        rounds += -(-max(due) // round_tokens)
    found = balance_seconds(latency, Split(4, 2), Load(old, zeros, context, zeros), new)
    assert found == pytest.approx(rounds * seconds)


def staged(packed_s: float, sent_s: float, shift_s: float = 0.01) -> CostModelPlanner:
    """A round is one token."""
    planner = make_planner(shift_s)
    stages = {(DP4TP2, DP4TP2, kind): s for kind, s in zip(STAGES, (packed_s, sent_s), strict=True)}
    table = planner.latency.migrate_table
    planner.latency = replace(planner.latency, migrate_table={**table, **stages}, page_size=1)
    return planner


class TestTwoStages:
    """`FOUR` moves 185 tokens to distances 3, 1, 3 and 1 of the first group: 5, 60, 60 and 60."""

    def test_a_slow_way_goes_on_while_they_decode(self):
        """100 rounds are sent, 85 follow and what two sequences of a distance say meanwhile; a step is uneven
        as long as the 100 are on their way."""
        planner = staged(packed_s=1e-4, sent_s=0.012)
        one = asked(planner, FOUR)
        two = asked(planner, FOUR, limits=SendLimits(100, 4, 1000))
        assert one is not None and two is not None and one.sending is None
        now_s, even_s = (planner._remaining(load(g), STAY)[1][1] for g in (GROUP, FOUR))
        steps = 4 * -(-100 * 0.012 // (4 * now_s))
        assert two.sending == (100, steps)
        idle_s = 100 * 1e-4 + (85 + 2 * 2 * steps) * 0.01
        assert two.predicted_cost_s == pytest.approx(idle_s + steps * (now_s - even_s))
        assert two.prediction is not None and two.prediction.kv_s == pytest.approx(idle_s)
        assert 1.2 * two.predicted_cost_s < one.predicted_cost_s == pytest.approx(1.85)
        assert two.predicted_saving_s == one.predicted_saving_s
        assert f"two stages with {steps:.0f} steps" in two.reason

    def test_the_last_page_of_each_distance_always_follows(self):
        two = asked(staged(1e-4, 0.012), FOUR, limits=SendLimits(1000, 1, 1000))
        assert two is not None and two.prediction is not None
        assert two.sending is not None
        said = 4 * two.sending.steps
        assert two.prediction.kv_s == pytest.approx(185 * 1e-4 + said * 0.01)
        # Two rounds to each distance, and what is said fits into those that follow.
        planner = staged(1e-4, 0.012)
        planner.latency = replace(planner.latency, round_tokens=60)
        two = asked(planner, FOUR, limits=SendLimits(1000, 1, 1000))
        assert two is not None and two.sending is not None and two.prediction is not None
        assert two.prediction.kv_s == pytest.approx(4 * 1e-4 + 2 * 0.01)

    @pytest.mark.parametrize(
        "packed_s, sent_s, limits",
        [
            (1e-4, 0.012, ONE_STAGE),
            (
                1e-4,
                0.012,
                SendLimits(20, 1, 1000),
            ),  # memory holds too little for the last fifth to pay
            (9e-3, 0.001, MANY),  # packing is what takes the time
            (1e-4, 3.0, MANY),  # they would be uneven for too long
            (1e-4, 0.012, SendLimits(100, 500, 1000)),  # so would they for a whole burst
        ],
    )
    def test_it_takes_one_where_two_do_not_pay(self, packed_s, sent_s, limits):
        planner = staged(packed_s, sent_s)
        balance = asked(planner, FOUR, limits=limits)
        assert same(balance, asked(planner, FOUR))

    def test_the_host_is_asked_twice(self):
        """Moves were seen to take much besides their bytes: one time more would."""
        planner = staged(packed_s=1e-4, sent_s=0.012, shift_s=0.003)
        limits = MANY
        first = asked(planner, FOUR, limits=limits)
        assert first is not None and first.sending is not None
        for profile_s in (1e-3, 2e-3, 0.5):
            prediction = Prediction(DP4TP2, DP4TP2, 0.0, profile_s, np.zeros(4), visits=2)
            planner.observe(Relocated(replace(first, prediction=prediction), profile_s + 2 * 0.25))
        assert 0.2 < planner.balance_costs.pages(0.0) < 0.27
        assert 0.4 < planner.balance_costs.pages(0.0, visits=2) < 0.54
        later = asked(planner, FOUR, limits=limits)
        assert later is not None and later.sending is None

    def test_moves_that_took_less_than_their_pages_make_no_second_visit_cheap(self):
        planner = staged(packed_s=9e-3, sent_s=1e-3)
        first = asked(planner, FOUR)
        assert first is not None
        planner.observe(Relocated(first, 0.6 * first.predicted_cost_s))
        costs = planner.balance_costs
        assert costs.pages(2.0) < 0.8 * 2.0, "less than by the profile"
        assert costs.pages(2.0, visits=2) == costs.pages(2.0)
        again = asked(planner, FOUR, limits=MANY)
        assert again is not None and again.sending is None

    @pytest.mark.parametrize("came, share", [("all", 1.0), ("some", 1.0), ("none", 0.0)])
    def test_a_frozen_planner_books_what_the_profile_says_of_what_came(self, came, share):
        planner = staged(packed_s=1e-4, sent_s=0.012)
        planner.is_frozen = True
        first = asked(planner, FOUR, limits=MANY)
        assert first is not None and first.prediction is not None
        account = planner._regret_budget
        assert account is not None
        before = account.spent_s(np.ones(4))
        planner.observe(Relocated(first, 123.0, came=came))
        booked = account.spent_s(np.ones(4)) - before
        assert booked == pytest.approx(share * first.prediction.kv_s)
        assert first.prediction.kv_s < first.predicted_cost_s

    def test_nothing_is_learned_of_a_move_that_did_not_come_to_its_end(self):
        planner = staged(packed_s=1e-4, sent_s=0.012)
        first = asked(planner, FOUR, limits=MANY)
        assert first is not None
        account = planner._regret_budget
        assert account is not None
        before = account.spent_s(np.ones(4))
        planner.observe(Relocated(first, 0.25, came="none"))
        assert planner.balance_costs.seen == ()
        assert account.spent_s(np.ones(4)) == before + 0.25
        assert same(asked(planner, FOUR, limits=MANY), first)

    def test_pages_that_are_on_their_way_for_longer_than_a_burst_are_waited_for(self):
        planner = staged(packed_s=1e-4, sent_s=0.008)
        long, short = (asked(planner, FOUR, limits=SendLimits(100, 1, n)) for n in (50, 2))
        assert long is not None and long.sending is not None and long.prediction is not None
        assert short is not None and short.sending is not None and short.prediction is not None
        assert long.sending.steps == 3 > 2 == short.sending.steps
        now_s = planner._remaining(load(GROUP), STAY)[1][1]
        waits_s = 100 * 0.008 - 2 * now_s
        assert 0.1 < waits_s < 0.2
        idle_s = long.prediction.kv_s + waits_s - 4 * 0.01  # each says a token less
        assert short.prediction.kv_s == pytest.approx(idle_s)

    def test_drafts_say_more_meanwhile(self):
        planner = staged(packed_s=1e-4, sent_s=0.012)
        predicted = DraftPrediction(tokens=3.0, step_s=0.5, plain_s=0.4)
        plan = replace(STAY, budget=3, predicted=predicted)
        two = asked(planner, FOUR, plan=plan, limits=MANY)
        assert two is not None and two.sending is not None and two.prediction is not None
        assert two.sending.steps == -(-100 * 0.012 // 0.5)
        idle_s = 100 * 1e-4 + (85 + 2 * 2 * 3 * two.sending.steps) * 0.01
        assert two.prediction.kv_s == pytest.approx(idle_s)

    def test_where_memory_holds_none_beside_a_burst_there_is_one_stage(self):
        planner = staged(packed_s=1e-4, sent_s=0.012)
        for spare, is_staged in ((0.0, False), (1.0, True)):
            memory = make_memory(1.0, staging=100)
            held = (memory.held(DP4TP2) + 100 * spare) / USABLE
            planner.memory = replace(memory, limit=held + 1e-6)
            found = asked(planner, FOUR, limits=MANY)
            assert found is not None and (found.sending is not None) == is_staged


def same(a: Balance | None, b: Balance | None) -> bool:
    assert a is not None and b is not None
    costs = [(x.predicted_saving_s, x.predicted_cost_s, x.sending, x.reason) for x in (a, b)]
    return costs[0] == costs[1] and bool((a.group == b.group).all())
