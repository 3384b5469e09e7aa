"""The account against plain sums, and when a switch is afforded."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.planning.planner.budget import SHARE, RegretBudget

positive = st.floats(0.01, 10)
by_layout = st.tuples(*[positive] * 4).map(np.array)
bursts = st.lists(st.tuples(st.integers(0, 3), by_layout), max_size=8)


@given(by_layout, st.integers(0, 3), bursts, by_layout, st.lists(positive, max_size=3))
def test_behind_is_what_was_spent_over_the_best_layout(prefill, start, ran, correction, switches):
    account = RegretBudget(prefill, start)
    for step, (_, profile_s) in enumerate(ran):
        account.expect(ran[step - 1][0], profile_s, step)  # of one step each
    if ran:
        account.expect(ran[-1][0], np.ones(4), len(ran))
    for seconds in switches:
        account.switch(seconds)
    spent = prefill[start] + sum(switches) + sum(s[i] * correction[i] for i, s in ran)
    static = [prefill[i] + sum(s[i] * correction[i] for _, s in ran) for i in range(4)]
    assert account.spent_s(correction) == pytest.approx(spent)
    assert account.behind_s(correction) == pytest.approx(spent - min(static))
    for cost, remaining in ((0.1, 1.0), (1.0, 100.0)):
        is_within = spent - min(static) + cost <= SHARE * (spent + remaining)
        assert account.affords(cost, remaining, correction) == is_within
