"""The length model as the planner uses it: survival curves, what they are conditional on."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length_models import CAP, experienced_model, learned, responses

from pat_jax.planning.lengths.model import LengthModel


@pytest.fixture(scope="module")
def experienced() -> LengthModel:
    return experienced_model()


class TestSurvival:
    moments = np.arange(0, 2 * CAP, 3)

    @settings(max_examples=60)
    @given(responses, responses, st.data())
    def test_it_falls_from_one_to_nothing_beyond_the_budget(self, first, second, data):
        model = learned(first, second)
        running = data.draw(
            st.lists(
                st.tuples(st.integers(0, CAP), st.integers(1, 2 * CAP)), min_size=1, max_size=8
            )
        )
        generated, remaining_tokens = (np.array(column) for column in zip(*running, strict=True))
        alive = model.survival(generated, remaining_tokens, self.moments)
        assert alive.shape == (len(running), len(self.moments)) and np.isfinite(alive).all()
        np.testing.assert_array_equal(alive[:, 0], 1.0)
        assert (np.diff(alive, axis=1) <= 1e-12).all() and (alive >= 0).all()
        assert (alive[self.moments[None, :] >= remaining_tokens[:, None]] == 0).all()

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


class TestExpected:
    @given(responses)
    def test_of_a_stranger_it_is_the_mean_of_all(self, rollout):
        model, stranger = learned(rollout), np.array([10**9])
        longer = model.survival(np.zeros(1, int), np.array([CAP + 1]), np.arange(CAP))
        assert model.expected(stranger)[0] == pytest.approx(longer.sum(), rel=0.02)

    def test_a_prompt_with_long_answers_before_is_expected_to_run_longer(self, experienced):
        prompts = experienced.prompts
        by_mean = prompts.prompt[np.argsort(prompts.mean)]
        short, long = by_mean[0], by_mean[-1]
        expected = experienced.expected(np.array([long, short, long, 10**9]))
        assert expected[0] == expected[2] > expected[3] > expected[1]


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
