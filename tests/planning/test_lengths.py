"""The length model against Kaplan and Meier's estimator, worked out response by response."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.planning.lengths import LengthModel

CAP = 12
responses = st.lists(st.tuples(st.integers(1, CAP), st.booleans()), min_size=1, max_size=40)


def learned(pairs, prior_weight: float = 1e-9) -> LengthModel:
    lengths, is_cut = np.array([n for n, _ in pairs]), np.array([cut for _, cut in pairs])
    empty = LengthModel(np.zeros(CAP + 1), np.zeros(CAP + 1), prior_weight=prior_weight)
    return empty.updated(lengths, is_cut)


def kaplan_meier(pairs, t: int) -> float:
    """P(length > t): the product over the moments of an end, each response looked at."""
    survival = 1.0
    for moment in range(t + 1):
        at_risk = sum(length >= moment for length, _ in pairs)
        ended = sum(length == moment and not cut for length, cut in pairs)
        if ended:
            survival *= 1 - ended / at_risk
    return survival


@given(responses)
def test_without_a_prior_it_is_kaplan_and_meiers(pairs):
    model = learned(pairs)
    survival = np.exp(model.log_survival())
    seen = max(length for length, _ in pairs)
    expected = [kaplan_meier(pairs, t) for t in range(seen + 1)]
    np.testing.assert_allclose(survival[: seen + 1], expected, atol=1e-6)


def test_a_textbook_example():
    """Kaplan and Meier 1958, table 1 in its own units: ends at 1, 3, 4, 5; cut at 2, 6, 7, 8."""
    pairs = [(1, False), (2, True), (3, False), (4, False), (5, False)]
    pairs += [(6, True), (7, True), (8, True)]
    survival = np.exp(learned(pairs, prior_weight=1e-12).log_survival())
    expected = [1, 7 / 8, 7 / 8, 7 / 8 * 5 / 6, 7 / 8 * 4 / 6, 7 / 8 * 3 / 6]
    np.testing.assert_allclose(survival[:6], expected, atol=1e-9)
    np.testing.assert_allclose(survival[6:9], expected[5], atol=1e-9)


def test_a_cut_response_counts_as_still_running():
    ended = learned([(5, False)] * 10)
    cut = learned([(5, False)] * 5 + [(5, True)] * 5)
    later = np.array([5])
    one = np.array([0])
    budget = np.array([100])
    assert ended.survival(one, budget, later) < 0.01
    assert cut.survival(one, budget, later) == pytest.approx(0.5)


@given(responses, st.floats(0.01, 10))
def test_survival_falls_from_one(pairs, prior_weight):
    survival = np.exp(learned(pairs, prior_weight).log_survival())
    assert survival[0] <= 1 and (np.diff(survival) <= 1e-12).all() and survival[-1] >= 0
    alive = learned(pairs, prior_weight).survival(
        np.array([0, 3]), np.array([CAP, 5]), np.arange(CAP + 1)
    )
    np.testing.assert_array_equal(alive[:, 0], 1.0)
    assert (np.diff(alive, axis=1) <= 1e-12).all() and (alive >= 0).all()
    assert (alive[0, CAP:] == 0).all() and (alive[1, 5:] == 0).all()  # no longer than its budget


@given(responses, st.integers(0, CAP - 1), st.integers(0, CAP))
def test_survival_is_conditional_on_what_was_generated(pairs, generated, moment):
    """Live with `generated` tokens means: longer than that."""
    model = learned(pairs, prior_weight=0.5)
    longer = np.exp(model.log_survival())
    later = min(generated + moment, CAP)
    expected = longer[later] / longer[generated] if longer[generated] else 0.0
    alive = model.survival(np.array([generated]), np.array([1000]), np.array([moment]))[0, 0]
    assert alive == pytest.approx(expected, abs=1e-9)


def test_the_token_at_which_all_ended_ends_the_next_one_too():
    model = learned([(6, False)] * 1000, prior_weight=1e-6)
    alive = model.survival(np.array([5]), np.array([100]), np.array([0, 1, 2]))
    np.testing.assert_allclose(alive, [[1.0, 0.0, 0.0]], atol=1e-6)
    alive = model.survival(np.array([4]), np.array([100]), np.array([0, 1, 2]))
    np.testing.assert_allclose(alive, [[1.0, 1.0, 0.0]], atol=1e-6)


def test_with_nothing_seen_the_prior_speaks():
    """A constant hazard: forgetful, and some still run at the cap."""
    survival = np.exp(LengthModel.empty(1000).log_survival())
    hazard = 1 - survival[1:] / survival[:-1]
    np.testing.assert_allclose(hazard, hazard[0])
    assert 0.1 < survival[-1] < 0.2


def test_the_past_fades():
    model = LengthModel.empty(CAP)
    short, long = np.full(50, 2), np.full(50, 11)
    none = np.zeros(50, bool)
    for lengths in [short] * 5 + [long] * 12:
        model = model.updated(lengths, none)
    alive = model.survival(np.array([0]), np.array([100]), np.array([6]))[0, 0]
    fresh = (
        LengthModel.empty(CAP)
        .updated(long, none)
        .survival(np.array([0]), np.array([100]), np.array([6]))
    )
    assert 0.85 < alive < 1
    assert alive == pytest.approx(fresh[0, 0], abs=0.1)
    assert model.ended[11] < 50 / (1 - model.keep)


def test_lengths_beyond_the_cap_count_at_the_cap():
    model = LengthModel.empty(CAP).updated(np.array([CAP + 5, 3]), np.array([True, False]))
    assert (model.cut[CAP], model.ended[3], model.cap) == (1, 1, CAP)


def test_a_model_comes_back_from_json():
    model = learned([(3, False), (7, True), (7, False)], prior_weight=2.0)
    back = LengthModel.from_json(json.loads(json.dumps(model.to_json())))
    np.testing.assert_array_equal(back.log_survival(), model.log_survival())
