"""The length model as the planner uses it: survival curves, what they are conditional on."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length_models import CAP, experienced_model, learned, log_normal, responses, siblings

from pat_jax.planning.lengths import model as lengths_module
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.types import Siblings


@pytest.fixture(scope="module")
def experienced() -> LengthModel:
    return experienced_model()


class TestSurvival:
    moments = np.arange(0, 2 * CAP, 3)

    @settings(max_examples=60)
    @given(responses, responses, st.data())
    def test_it_falls_from_one_to_nothing_beyond_the_budget(self, first, second, data):
        model = learned(first, second)
        live = data.draw(
            st.lists(
                st.tuples(st.integers(0, CAP), st.integers(1, 2 * CAP), st.integers(0, 4)),
                min_size=1,
                max_size=8,
            )
        )
        done = data.draw(
            st.lists(st.tuples(st.integers(1, CAP), st.integers(0, 4), st.booleans()), max_size=8)
        )
        generated, budget, of_live = (np.array(column) for column in zip(*live, strict=True))
        known = siblings(
            of_live, [d for d, _, _ in done], [p for _, p, _ in done], [c for _, _, c in done]
        )
        for given_siblings in (None, known):
            alive = model.survival(generated, budget, self.moments, given_siblings)
            assert alive.shape == (len(live), len(self.moments)) and np.isfinite(alive).all()
            np.testing.assert_array_equal(alive[:, 0], 1.0)
            assert (np.diff(alive, axis=1) <= 1e-12).all() and (alive >= 0).all()
            assert (alive[self.moments[None, :] >= budget[:, None]] == 0).all()

    @given(responses, st.integers(0, CAP - 1), st.integers(0, CAP))
    def test_it_is_conditional_on_what_was_generated(self, rollout, generated, moment):
        """Live with `generated` tokens means: longer than that. A ratio of Kaplan-Meier's."""
        model = learned(rollout, prior_weight=0.5)
        longer = model.survival(np.array([0]), np.array([1000]), np.arange(CAP + 1))[0]
        later = min(generated + moment, CAP)
        alive = model.survival(np.array([generated]), np.array([1000]), np.array([moment]))[0, 0]
        assert alive == pytest.approx(longer[later] / longer[generated], abs=1e-9)

    def test_a_cut_response_counts_as_still_running(self):
        ended = learned([(5, False, i) for i in range(10)], prior_weight=1e-9)
        cut = learned([(5, i % 2 == 0, i) for i in range(10)], prior_weight=1e-9)
        ask = np.array([0]), np.array([100]), np.array([5])
        assert ended.survival(*ask) < 0.01
        assert cut.survival(*ask) == pytest.approx(0.5)

    def test_the_token_at_which_all_ended_ends_the_next_one_too(self):
        model = learned([(6, False, i) for i in range(1000)], prior_weight=1e-6)
        alive = model.survival(np.array([5]), np.array([100]), np.array([0, 1, 2]))
        np.testing.assert_allclose(alive, [[1.0, 0.0, 0.0]], atol=1e-6)
        alive = model.survival(np.array([4]), np.array([100]), np.array([0, 1, 2]))
        np.testing.assert_allclose(alive, [[1.0, 1.0, 0.0]], atol=1e-6)

    def test_with_nothing_known_of_siblings_it_is_the_same_curve(self, experienced):
        """A new prompt with one running sample: no news, but for the few that are strangers."""
        ask = np.array([0]), np.array([4096]), np.arange(0, 4000, 100)
        alone = experienced.survival(*ask, siblings([0], prompt=[12345]))
        np.testing.assert_allclose(alone, experienced.survival(*ask), atol=0.01)


class TestSiblings:
    ask = np.array([200]), np.array([4096]), np.arange(0, 2000, 50)

    def expected(self, model: LengthModel, known: Siblings) -> float:
        return model.survival(*self.ask, known)[0].sum()

    @given(st.integers(200, 900), st.integers(1, 7))
    def test_longer_finished_siblings_mean_longer(self, experienced, length, count):
        prompt = [777]
        one, two = (
            self.expected(experienced, siblings([0], [n] * count, [0] * count, prompt=prompt))
            for n in (length, int(1.3 * length))
        )
        assert two > one

    def test_cut_siblings_mean_longer_than_ended_ones(self, experienced):
        ended = siblings([0], [400] * 3, [0] * 3, prompt=[777])
        cut = replace(ended, is_cut=np.ones(3, bool))
        assert self.expected(experienced, cut) > 1.1 * self.expected(experienced, ended)

    def test_running_siblings_mean_longer(self, experienced):
        """Late, with none of eight done, each will take longer than one that runs alone."""
        late, budget, moments = 900, 4096, np.arange(0, 2000, 50)
        one = experienced.survival(
            np.array([late]), np.array([budget]), moments, siblings([0], prompt=[777])
        )
        eight = experienced.survival(
            np.full(8, late), np.full(8, budget), moments, siblings([0] * 8, prompt=[777])
        )
        assert eight[0].sum() > 1.1 * one[0].sum()

    def test_a_prompt_with_long_answers_before_means_longer(self, experienced):
        order = np.argsort(experienced.effects.mean)
        remaining = [
            self.expected(experienced, siblings([0], prompt=[experienced.effects.prompt[i]]))
            for i in order
        ]
        assert remaining[-1] > 2 * remaining[0]
        assert (np.diff(remaining) > -0.5).mean() > 0.95  # all but ordered: variances differ

    def test_what_outlives_all_its_siblings_by_far_is_a_stranger(self, experienced):
        known = siblings([0], [100] * 7, [0] * 7, prompt=[777])
        alive = experienced.survival(np.array([1500]), np.array([9999]), np.array([300]), known)
        alone = experienced.survival(np.array([1500]), np.array([9999]), np.array([300]))
        assert alive[0, 0] == pytest.approx(alone[0, 0], abs=0.1)

    def test_when_all_others_end_late_the_rest_is_expected_to(self, experienced):
        """Prompts of their own, all longer than expected: the rollout as a whole has shifted."""
        others = np.arange(1, 65)
        shifted, usual = (
            self.expected(
                experienced,
                siblings([0], np.full(64, n), others, prompt=np.arange(1000, 1065)),
            )
            for n in (600, 300)
        )
        assert shifted > 2.2 * usual


class TestExpected:
    @given(responses)
    def test_it_is_the_mean_of_the_curve(self, rollout):
        model = learned(rollout)
        strangers = model.expected(np.array([10**9, 10**9 + 1]))
        both = siblings([0, 1], prompt=[10**9, 10**9 + 1])
        alive = model.curves(np.zeros(2, int), np.arange(CAP), both)[0]
        np.testing.assert_allclose(strangers, alive.sum(axis=1), rtol=0.02)

    def test_a_prompt_with_long_answers_before_is_expected_to_run_longer(self, experienced):
        effects = experienced.effects
        by_mean = effects.prompt[np.argsort(effects.mean)]
        short, long = by_mean[0], by_mean[-1]
        expected = experienced.expected(np.array([long, short, long, 10**9]))
        assert expected[0] == expected[2] > expected[3] > expected[1]


class TestManySequences:
    """More than `EXACT_ROWS` share curves: nearly the same numbers, the same promises."""

    @pytest.mark.parametrize("is_ragged", [False, True])
    def test_shared_curves_are_nearly_their_own(self, experienced, is_ragged, monkeypatch):
        rng, count = np.random.default_rng(4), 4096
        generated = rng.integers(0, 800, count) if is_ragged else np.full(count, 250)
        known = siblings(
            np.repeat(np.arange(512), 8),
            log_normal(rng, 600),
            rng.integers(0, 512, 600),
        )
        ask = generated, 4096 - generated, np.arange(0, 3000, 60), known
        shared = experienced.survival(*ask)
        monkeypatch.setattr(lengths_module, "EXACT_ROWS", count)
        exact = experienced.survival(*ask)
        assert np.abs(shared - exact).max() < (0.25 if is_ragged else 0.08)
        assert np.abs(shared - exact).mean() < 0.005
        assert np.abs(shared.sum(axis=0) - exact.sum(axis=0)).max() < 0.002 * count

    def test_budgets_are_kept_to_the_token(self, experienced):
        budget = np.arange(1, 1001)
        moments = np.arange(0, 1200, 7)
        alive = experienced.survival(np.full(1000, 9), budget, moments)
        assert (alive[moments[None, :] >= budget[:, None]] == 0).all()
        assert (alive[:, 0] == 1).all()


def test_the_model_is_a_value(experienced):
    before = json.dumps(experienced.to_json())
    experienced.updated(np.array([5, 9]), np.array([False, True]), np.array([3, 200_000]))
    assert json.dumps(experienced.to_json()) == before
    assert experienced.updated(np.zeros(0, int), np.zeros(0, bool)) is experienced


def test_lengths_beyond_the_cap_count_at_the_cap():
    model = LengthModel.empty(CAP).updated(np.array([CAP + 5, 3]), np.array([True, False]))
    at = model.baseline.bins(np.array([CAP, 3]))
    assert (model.baseline.cut[at[0]], model.baseline.ended[at[1]]) == (1, 1)


def test_the_past_fades():
    model, none = LengthModel.empty(CAP), np.zeros(50, bool)
    for length in [8] * 5 + [44] * 20:
        model = model.updated(np.full(50, length), none)
    alive = model.survival(np.array([0]), np.array([100]), np.array([30, 50]))[0]
    assert alive[0] > 0.9 and alive[1] < 0.1
    assert model.baseline.at_risk[0] < 50 / (1 - model.keep)


def test_what_was_asked_last_is_remembered_and_nothing_else(experienced: LengthModel):
    model, moments = replace(experienced), np.arange(0, CAP, 5)
    generated, others = np.array([0, 3, 9]), siblings(np.array([0, 1, 1]), [4], [0], [False])
    first = model.curves(generated, moments, others)
    assert model.curves(generated.copy(), moments.copy(), others) is first
    generated[:] += 5  # the same array with other numbers in it
    changed = (
        (generated, moments, others),
        (generated, moments[1:], others),
        (generated, moments, None),
    )
    for asked in changed:
        found, anew = model.curves(*asked), replace(experienced).curves(*asked)
        assert found is not first
        np.testing.assert_array_equal(found[0][found[1]], anew[0][anew[1]])
