"""The account against plain sums, and when a switch is afforded or due."""

import numpy as np
import pytest
from fakes import SPLITS
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.planning.planner.budget import (
    SHARE,
    RegretBudget,
)

DP8, DP4TP2, DP2TP4, TP8 = SPLITS
NONE = np.ones(4)  # no correction

positive = st.floats(0.01, 10)
by_layout = st.tuples(*[positive] * 4).map(np.array)
bursts = st.lists(st.tuples(st.integers(0, 3), by_layout), max_size=8)


@given(by_layout, st.integers(0, 3), bursts, by_layout, st.lists(positive, max_size=3))
def test_behind_is_what_was_spent_over_the_best_layout(prefill, start, ran, correction, switches):
    account = RegretBudget(prefill, start)
    for step, (_, profile_s) in enumerate(ran):
        account.expect(ran[step - 1][0], profile_s, step, correction)  # of one step each
    if ran:
        account.expect(ran[-1][0], NONE, len(ran), correction)
    for there, seconds in enumerate(switches, start + 1):
        account.switch(there, seconds, 1e9, correction)
    spent = prefill[start] + sum(switches) + sum(s[i] * correction[i] for i, s in ran)
    static = [prefill[i] + sum(s[i] * correction[i] for _, s in ran) for i in range(4)]
    assert account.spent_s(correction) == pytest.approx(spent)
    assert account.behind_s(correction) == pytest.approx(spent - min(static))
    for cost, remaining in ((0.1, 1.0), (1.0, 100.0)):
        is_within = spent - min(static) + cost <= SHARE * (spent + remaining)
        assert account.affords(cost, remaining, correction) == (is_within and account.doubt == 1)


def lose(account: RegretBudget, step_s: np.ndarray, steps: int) -> None:
    """So many steps of a burst in the first layout, and as much again to be expected."""
    if account._expected is None:
        account.expect(0, step_s, 0, NONE)
    assert account._expected is not None
    account.expect(0, step_s, account._expected[1] + steps, NONE)


def test_a_layout_is_due_once_its_rent_has_paid_for_the_switch():
    account, cost = RegretBudget(np.zeros(4), 0), np.array([0.0, 9.0, 9.0, 1.0])
    step, due = np.array([0.3, 0.3, 0.3, 0.2]), []
    for _ in range(12):
        lose(account, step, 1)  # 0.1 s of rent
        due.append(account.due(0, step, cost, cost))
    assert due[:9] == [None] * 9 and due[10:] == [3, 3]
    # It has become the slower one since: no rent tells of the future.
    assert account.due(0, step[::-1], cost, cost) is None


def test_rent_is_that_of_late():
    """What was gained by being here long ago does not hide what is being lost now."""
    account = RegretBudget(np.zeros(4), 0)
    for step, other in enumerate((5.0, 0.5, 0.5)):
        account.expect(0, np.array([1.0, other, 1.0, 1.0]), step, NONE)
    assert account.rent_s.tolist() == [0.0, 0.5, 0.0, 0.0]
    account.switch(1, 1.0, 100.0, NONE)
    assert not account.rent_s.any()
