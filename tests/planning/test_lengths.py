"""The length model as the planner uses it: survival curves, what they are conditional on, whether their
bands hold what they claim, and what is kept of it."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length_models import CAP, experienced_model, learned, log_normal, responses
from scipy.special import ndtr

from pat_jax.common.errors import UserError
from pat_jax.planning.lengths import model
from pat_jax.planning.lengths.baseline import Baseline
from pat_jax.planning.lengths.model import LengthModel, PromptMeans, StreamedLengths


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


class TestCalibration:
    """Lengths by the documented hierarchy, of prompts never seen: bands hold what they claim."""

    @staticmethod
    def rollout(rng, level, samples):
        lengths = np.repeat(level, samples) * rng.lognormal(0, 0.4, samples * len(level))
        return np.minimum(lengths.astype(int) + 1, 2000)

    def places(self) -> np.ndarray:
        """Where each length fell in its predicted distribution; even on [0, 1] if calibrated."""
        rng, model = np.random.default_rng(8), LengthModel.empty(2000)
        for _ in range(6):
            lengths = self.rollout(rng, rng.lognormal(6, 0.6, 128), 8)
            model = model.updated(lengths, lengths == 2000)
        lengths, now = self.rollout(rng, rng.lognormal(6, 0.6, 256), 8), 400
        lengths = lengths[lengths > now]
        left = lengths - now
        alive = model.survival(np.array([now]), np.array([2000 - now]), np.arange(1600))[0]
        below, above = alive[left - 1], alive[np.minimum(left, 1599)]
        above = np.where(lengths == 2000, 0.0, above)
        return 1 - (above + rng.random(len(left)) * (below - above))

    def test_half_falls_in_the_middle_half_and_nine_tenths_in_the_middle_nine(self):
        place = self.places()
        assert np.mean((place > 0.25) & (place < 0.75)) == pytest.approx(0.5, abs=0.06)
        assert np.mean((place > 0.05) & (place < 0.95)) == pytest.approx(0.9, abs=0.04)


@pytest.mark.parametrize("times", [2.0, 4.0, 0.5])
def test_lengths_that_jump_are_followed(times):
    """Ten rollouts of 1,024 log-normal responses, then so many times as long; the cap at 8,192."""
    rng, cap, spread = np.random.default_rng(0), 8192, 0.8
    model, ask = LengthModel.empty(cap), (np.zeros(1, int), np.array([cap]))
    for median in [900] * 10 + [round(900 * times)] * 12:
        lengths = np.clip(rng.lognormal(np.log(median), spread, 1024), 1, cap).astype(int)
        model = model.updated(lengths, lengths == cap)
    alive = model.survival(*ask, np.array([median, cap - 1]))[0]
    truth = ndtr((np.log(median) - np.log(cap)) / spread)
    assert alive[0] == pytest.approx(0.5, abs=0.06)
    assert alive[1] == pytest.approx(truth, rel=0.25, abs=0.002)


class TestAnotherCap:
    ask = np.array([0, 1000]), np.array([4096, 3096]), np.arange(0, 4096, 64)

    @pytest.mark.parametrize("cap", [1024, 2048])
    def test_it_is_the_model_that_had_that_cap_from_the_start(self, cap):
        """Responses cut at 1,024 tokens say nothing of what comes after, in either."""
        lengths = np.minimum(log_normal(np.random.default_rng(5), 512, median=900), 1024)
        moved, known = (
            LengthModel.empty(cap).updated(lengths, lengths == 1024) for cap in (cap, 4096)
        )
        moved = moved.with_cap(4096)
        np.testing.assert_array_equal(moved.survival(*self.ask), known.survival(*self.ask))
        assert moved.survival(*self.ask)[1, -2] < 0.5
        one, other = (m.updated(4 * lengths, 4 * lengths >= 4096) for m in (moved, known))
        np.testing.assert_array_equal(one.baseline.cut, other.baseline.cut)

    def test_a_smaller_cap_forgets_nothing(self, experienced):
        there_and_back = experienced.with_cap(100).with_cap(experienced.cap)
        assert there_and_back.to_json() == experienced.to_json()
        alive = experienced.with_cap(100).survival(
            np.array([50]), np.array([50]), np.array([49, 50, 60])
        )[0]
        assert alive[0] > 0 and (alive[1:] == 0).all()


class TestJson:
    @given(responses, responses)
    def test_a_model_comes_back_exactly_and_goes_on_alike(self, first, second):
        model = replace(learned(first, prior_weight=0.7), keep=0.6)
        back = LengthModel.from_json(json.loads(json.dumps(model.to_json())))
        assert back.to_json() == model.to_json()
        lengths, is_cut, prompt = (np.array(column) for column in zip(*second, strict=True))
        after, after_back = (m.updated(lengths, is_cut, prompt) for m in (model, back))
        assert after.to_json() == after_back.to_json()
        ask = np.array([3, 4, 5]), np.array([50, 50, 50]), np.arange(50)
        np.testing.assert_array_equal(after.survival(*ask), after_back.survival(*ask))

    def test_an_older_version_is_refused(self):
        with pytest.raises(UserError, match="version 1, this is version 3"):
            LengthModel.from_json({"ended": [0.0], "cut": [0.0]})


def test_a_prompt_is_expected_to_be_as_it_was_and_a_stranger_as_all_are():
    means = PromptMeans().updated(np.array([10, 30, 100]), np.array([7, 7, 3]))
    assert means.expected(np.array([3, 5, 7, 3, 9]), 50.0).tolist() == [100, 50, 20, 100, 50]


def test_the_last_rollout_counts_as_much_as_those_before():
    means = PromptMeans()
    for length in (10, 20, 40):
        means = means.updated(np.full(4, length), np.full(4, 7))
    assert means.expected(np.array([7]), 0.0).tolist() == [27.5]


def test_memory_is_bounded_and_keeps_the_first(monkeypatch):
    monkeypatch.setattr(model, "MAX_PROMPTS", 3)
    means = PromptMeans().updated(np.array([1, 2]), np.array([9, 4]))
    means = means.updated(np.array([3, 4, 5]), np.array([1, 2, 9]))
    assert means.prompt.tolist() == [1, 4, 9]
    assert means.expected(np.array([9, 2]), 0.0).tolist() == [3, 0]


MOST, ROWS, MEDIAN = 4096, 64, 400


def after(steps: int, lengths: np.ndarray) -> StreamedLengths:
    """So many decode steps into a stream whose rows are filled again as soon as they are free."""
    seen = StreamedLengths(LengthModel.empty(MOST), len(lengths))
    free_at = np.zeros(ROWS, int)
    for i, length in enumerate(lengths):
        row = int(free_at.argmin())
        begin, free_at[row] = int(free_at[row]), free_at[row] + length
        if begin < steps:
            seen.note(i, min(length, steps - begin), has_ended=begin + length <= steps)
    return seen


def share_longer(model: LengthModel, tokens: int) -> float:
    return float(model.survival(np.array([0]), np.array([MOST]), np.array([tokens]))[0, 0])


@pytest.mark.parametrize("steps", [200, 400, 1000, 4000])
def test_half_are_expected_to_be_longer_than_the_median_at_every_moment(steps):
    """At 400 steps those that have ended alone would say 0.04, an empty model 0.82."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(MEDIAN), 0.7, 2048).astype(int), 1, MOST - 1)
    seen = after(steps, lengths)
    at = np.minimum(MEDIAN, steps)
    truth = float((lengths > at).mean())
    assert share_longer(seen.model(), at) == pytest.approx(truth, abs=0.08)


def test_what_is_cut_is_longer_and_what_is_stopped_has_ended():
    cut, stopped = (StreamedLengths(LengthModel(Baseline.empty(MOST, 1e-6)), 4) for _ in range(2))
    for i in range(4):
        cut.note(i, 100, has_ended=i == 0)
        stopped.note(i, 100, has_ended=True)  # a stop string in it
        stopped.note(i, 100, has_ended=False)  # and no token that ends it
    assert share_longer(cut.model(), 100) == pytest.approx(0.75, abs=0.01)
    assert share_longer(stopped.model(), 100) == pytest.approx(0, abs=0.01)


def test_requests_that_have_not_begun_say_nothing():
    before = LengthModel.empty(MOST)
    assert StreamedLengths(before, 5).model() is before
