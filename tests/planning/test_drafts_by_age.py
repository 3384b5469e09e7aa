"""What is known of drafts by what rows have said, and how a rollout differs from it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.planning.drafts import DRAFTS, KINDS, MOST, NO_SOURCES, Acceptance, Drafted
from pat_jax.planning.drafts_by_age import AGES, AcceptanceByAge
from pat_jax.planning.types import DraftPrediction, Verified

DRAFT = 7
MATCHED = 3  # the kind of match that is there
RUNS = 100_000  # so many that nothing from before them counts


def came(rate: float, age: float, known: AcceptanceByAge | None = None) -> Verified:
    """Of a burst whose drafts are right token by token with so much probability; predicted as `known` has it."""
    begun = RUNS * np.eye(KINDS)[MATCHED]
    tried, right = np.zeros((2, 2, KINDS, MOST))
    tried[DRAFTS, MATCHED] = RUNS * rate ** np.arange(MOST)
    right[DRAFTS, MATCHED] = rate * tried[DRAFTS, MATCHED]
    forks = RUNS * np.eye(KINDS)[:1] * np.ones((KINDS, 1))
    drafted = Drafted(begun, tried, right, forks, 0, NO_SOURCES)
    said = sum(rate**n for n in range(1 + DRAFT))
    predicted = None
    if known is not None:
        of_age = float(known.at(age).tokens(DRAFT, DRAFT, 1)) - 1
        predicted = DraftPrediction(1 + known.times * of_age, of_age, 1.0, 1.0)
    return Verified(drafted, age, predicted, round(said * RUNS), RUNS)


def rollout(known: AcceptanceByAge, rates: dict[float, float]) -> AcceptanceByAge:
    for age, rate in rates.items():
        known = known.observed(came(rate, age, known))
    return known


def right(known: AcceptanceByAge, age: float) -> float:
    """Expected of a row's draft."""
    return known.times * (float(known.at(age).tokens(DRAFT, DRAFT, 1)) - 1)


def truth(rate: float) -> float:
    return sum(rate**n for n in range(1, 1 + DRAFT))


def test_in_a_first_rollout_what_came_last_is_expected_at_every_age():
    known = AcceptanceByAge.unseen()
    assert right(known, 0) == right(known, 5000) == Acceptance.unseen().tokens(DRAFT, DRAFT, 1) - 1
    for age, rate in ((10, 0.2), (100, 0.5)):
        known = known.observed(came(rate, age, known))
        assert right(known, age) == right(known, 5000) == pytest.approx(truth(rate), rel=0.01)


def test_in_the_next_each_age_is_expected_to_be_what_it_was():
    rates = {10.0: 0.2, 200.0: 0.5, 4000.0: 0.8}
    known = rollout(AcceptanceByAge.unseen(), rates).of_new_rollout()
    for age, rate in rates.items():
        assert right(known, age) == pytest.approx(truth(rate), rel=0.01)
    # Of other ages, what is known of the nearest: here in doublings.
    assert right(known, 1200) == right(known, 4000) and right(known, 1e6) == right(known, 4000)
    assert right(known, 0) == right(known, 10)
    # And the same from step to step as it goes as predicted.
    again = rollout(known, rates)
    assert again.times == pytest.approx(1.0, abs=0.01)


def test_a_rollout_that_is_worse_than_the_last_is_expected_to_be_so_at_every_age():
    known = rollout(AcceptanceByAge.unseen(), {10.0: 0.4, 4000.0: 0.8}).of_new_rollout()
    worse = known.observed(came(0.2, 10.0, known))
    assert worse.times == pytest.approx(truth(0.2) / truth(0.4), rel=0.01)
    assert right(worse, 10) == pytest.approx(truth(0.2), rel=0.01)
    assert right(worse, 4000) == pytest.approx(truth(0.8) * worse.times, rel=0.01)
    # The next one begins with what is known by then, and with nothing else against it.
    begun = worse.of_new_rollout()
    assert begun.times == 1.0 and right(begun, 10) == pytest.approx(truth(0.2), rel=0.01)
    assert right(begun, 4000) == pytest.approx(truth(0.8), rel=0.01)


def test_where_nothing_was_ever_right_nothing_is_expected():
    """After so many steps that no float holds what a rollout began with."""
    known = AcceptanceByAge.unseen().observed(came(0.0, 10.0)).of_new_rollout()
    predicted, steps = DraftPrediction(1.0, 0.0, 1.0, 1.0), 10**7
    none_right = Verified(came(0.0, 10.0).drafted, 10.0, predicted, steps, steps)
    assert known.observed(none_right).times == 0


def test_a_few_steps_say_little_of_a_rollout():
    known = rollout(AcceptanceByAge.unseen(), {10.0: 0.8}).of_new_rollout()
    none_right = Verified(came(0.0, 10.0).drafted, 10.0, came(0.8, 10.0, known).predicted, 4, 4)
    assert 0.6 < known.observed(none_right).times < 0.8


@given(st.lists(st.floats(0, 1e7), min_size=1, max_size=8), st.floats(0, 1e7))
def test_what_is_known_of_an_age_is_that_of_the_nearest(ages, asked):
    """Each age has a rate of its own."""
    rates = {age: 0.1 + 0.8 * k / len(ages) for k, age in enumerate(ages)}
    known = rollout(AcceptanceByAge.unseen(), rates).of_new_rollout()
    places = {age: np.searchsorted(AGES, age, side="right") for age in (*ages, asked)}
    distance = {age: abs(int(places[age] - places[asked])) for age in ages}
    nearest = [rates[age] for age in ages if distance[age] == min(distance.values())]
    # Of several in one bucket all count.
    found = right(known, asked)
    assert truth(min(nearest)) * 0.98 <= found <= truth(max(nearest)) * 1.02
    several, which = known.at_ages(np.array([asked, *ages]))
    assert several[which[0]] is known.at(asked) and len(several) == len(set(which.tolist()))
