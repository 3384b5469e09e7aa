"""The account against plain sums, and when a switch is afforded or due."""

import math

import numpy as np
import pytest
from fakes import SPLITS, made_up_latency, ran
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.planning.planner.budget import (
    DOUBT,
    MOST_RENT,
    MULTIPLE,
    SHARE,
    RegretBudget,
    without_optimism,
)

DP8, DP4TP2, DP2TP4, TP8 = SPLITS
NONE = np.ones(4)  # no correction

positive = st.floats(0.01, 10)
by_layout = st.tuples(*[positive] * 4).map(np.array)
bursts = st.lists(st.tuples(st.integers(0, 3), by_layout), max_size=8)


@given(by_layout, st.integers(0, 3), bursts, by_layout, st.lists(positive, max_size=3))
def test_behind_is_what_was_spent_over_the_best_layout(prefill, start, ran, correction, switches):
    account = RegretBudget(prefill, start)
    for here, profile_s in ran:
        account.burst(here, profile_s, correction)
    for there, seconds in enumerate(switches, start + 1):
        account.switch(there, seconds, was_afforded=True)
    spent = prefill[start] + sum(switches) + sum(s[i] * correction[i] for i, s in ran)
    static = [prefill[i] + sum(s[i] * correction[i] for _, s in ran) for i in range(4)]
    assert account.spent_s(correction) == pytest.approx(spent)
    assert account.behind_s(correction) == pytest.approx(spent - min(static))
    for cost, remaining in ((0.1, 1.0), (1.0, 100.0)):
        is_within = spent - min(static) + cost <= SHARE * (spent + remaining)
        assert account.affords(cost, remaining, correction) == is_within


def test_a_layout_is_due_once_its_rent_has_paid_for_the_switch():
    account, cost = RegretBudget(np.zeros(4), 0), np.array([0.0, 9.0, 9.0, 1.0])
    step = np.array([0.3, 0.3, 0.3, 0.2])
    due = []
    for _ in range(12):
        account.burst(0, step, NONE)  # 0.1 s of rent
        due.append(account.due(0, step, cost, cost))
    assert due[:9] == [None] * 9 and due[10:] == [3, 3]
    # It has become the slower one since: no rent tells of the future.
    assert account.due(0, step[::-1], cost, cost) is None


@pytest.mark.parametrize(("loss", "rent"), [(-1.0, 1.0), (1.5, 1.5), (2.5, 2.5), (50.0, MOST_RENT)])
def test_rent_must_outgrow_a_loss_that_is_predicted(loss: float, rent: float):
    account, step = RegretBudget(np.zeros(4), 0), np.array([0.3, 0.3, 0.3, 0.2])
    cost, losses = np.array([0.0, 9.0, 9.0, 1.0]), np.array([0.0, 9.0, 9.0, loss])
    while account.due(0, step, cost, losses) is None:
        account.burst(0, step, NONE)  # 0.1 s of rent
    assert account.rent_s[3] == pytest.approx(rent + 0.05, abs=0.06)


def test_rent_is_that_of_late():
    """What was gained by being here long ago does not hide what is being lost now."""
    account = RegretBudget(np.zeros(4), 0)
    for other in (5.0, 0.5):
        account.burst(0, np.array([1.0, other, 1.0, 1.0]), NONE)
    assert account.rent_s.tolist() == [0.0, 0.5, 0.0, 0.0]
    account.switch(1, 1.0, was_afforded=True)
    assert not account.rent_s.any()


@pytest.mark.parametrize("is_back", [True, False])
def test_each_switch_past_the_budget_or_back_makes_the_next_one_harder(is_back: bool):
    account, step = RegretBudget(np.zeros(4), 0), np.array([2.0, 1.0, 2.0, 2.0])
    cost = np.full(4, 1.5)
    for times in (1, DOUBT, DOUBT**2):
        assert account.must_save(1.5) == MULTIPLE * times * 1.5
        bursts_until_due = 0
        while account.due(0, step, cost, cost) is None:
            account.burst(0, step, NONE)
            bursts_until_due += 1
        assert bursts_until_due == math.floor(1.5 * times) + 1
        if is_back:
            account.switch(0, 1.0, was_afforded=True)
        else:
            account.switch(1 + int(times), 1.0, was_afforded=True)
            assert account.must_save(1.5) == MULTIPLE * times * 1.5
            account.switch(2 + int(times), 1.0, was_afforded=False)


def test_no_budget_is_left_once_a_rollout_has_come_back_to_a_layout():
    account = RegretBudget(np.zeros(4), 0)
    account.switch(1, 0.0, was_afforded=True)
    assert account.affords(1.0, 100.0, NONE)
    account.switch(0, 0.0, was_afforded=True)
    assert not account.affords(1e-9, 100.0, NONE)


class TestSober:
    latency = made_up_latency(
        dict.fromkeys(SPLITS, 0.5), dict.fromkeys(SPLITS, 0.0), reslice=1.0, migrate_per_token=0.0
    )

    def seen(self, **ratios: float) -> np.ndarray:
        latency = self.latency
        for _ in range(50):
            for name, ratio in ratios.items():
                split = next(split for split in SPLITS if str(split) == name)
                seconds = ratio * self.latency.decode_step(split, 4, 64)
                latency = latency.observed(ran(split, 4, 64, seconds))
        return without_optimism(latency, SPLITS)

    def test_nothing_seen_the_profile_holds(self):
        np.testing.assert_array_equal(self.seen(), NONE)

    def test_unseen_layouts_are_off_as_the_others(self):
        np.testing.assert_allclose(self.seen(dp8tp1=1.5), 1.5, rtol=0.02)
        mixed = self.seen(dp8tp1=1.5, dp1tp8=0.8)
        np.testing.assert_allclose(mixed[[0, 3]], [1.5, 0.8], rtol=0.02)
        np.testing.assert_allclose(mixed[[1, 2]], math.sqrt(1.5 * 0.8), rtol=0.02)
