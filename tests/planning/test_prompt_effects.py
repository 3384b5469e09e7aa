"""The hierarchy against integration over a grid, and against simulations with a known answer."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_ndtr

from pat_jax.planning.lengths import prompt_effects
from pat_jax.planning.lengths.prompt_effects import Evidence, PromptEffects, posterior

NONE = np.zeros(0)
NO_INDEX = np.zeros(0, int)


def evidence(ended=(), open_=(), *, ended_of=None, open_of=None) -> Evidence:
    """Scores; all of prompt 0 where nothing else is said."""
    return Evidence(
        np.array(ended, float),
        np.zeros(len(ended), int) if ended_of is None else np.array(ended_of),
        np.array(open_, float),
        np.zeros(len(open_), int) if open_of is None else np.array(open_of),
    )


scores = st.floats(-3, 3)


@given(
    mean=scores,
    variance=st.floats(0.05, 2),
    noise=st.floats(0.05, 1),
    ended=st.lists(scores, max_size=6),
    open_=st.lists(st.tuples(st.floats(-6, 4), st.integers(1, 9)), max_size=3),
)
def test_the_posterior_is_that_of_a_fine_grid(mean, variance, noise, ended, open_):
    at, counts = np.array([[z for z, _ in open_]]), np.array([[n for _, n in open_]])
    mode, width = posterior(
        np.array([mean]),
        np.array([variance]),
        noise,
        np.array([len(ended)]),
        np.array([sum(ended)]),
        counts,
        at,
    )
    theta = np.linspace(-8, 10, 36_001)[:, None]
    log_density = (
        -((theta - mean) ** 2) / (2 * variance)
        - ((np.array([ended]) - theta) ** 2).sum(axis=1, keepdims=True) / (2 * noise)
        + (counts * log_ndtr((theta - at) / np.sqrt(noise))).sum(axis=1, keepdims=True)
    ).ravel()
    assert mode[0] == pytest.approx(theta[log_density.argmax(), 0], abs=1e-3)
    middle = np.clip(log_density.argmax(), 40, 35_960)
    curvature = np.diff(log_density[[middle - 40, middle, middle + 40]], 2)[0] / 0.02**2
    assert 1 / width[0] == pytest.approx(-curvature, rel=0.02)


def test_without_censoring_it_is_the_conjugate_formula():
    mode, width = posterior(
        np.array([0.5]),
        np.array([0.3]),
        0.7,
        np.array([4]),
        np.array([2.0]),
        np.zeros((1, 0)),
        NONE,
    )
    precision = 1 / 0.3 + 4 / 0.7
    assert width[0] == pytest.approx(1 / precision, rel=1e-12)
    assert mode[0] == pytest.approx((0.5 / 0.3 + 2.0 / 0.7) / precision, rel=1e-12)


class TestOutlook:
    effects = PromptEffects(products=50.0, squares=90.0)  # ρ = 0.53
    ids = np.array([7])

    def outlook(self, seen: Evidence, ids=None, effects=None) -> tuple[float, float]:
        ids = self.ids if ids is None else ids
        mean, variance = (effects or self.effects).outlook(ids, seen, 1e-6)
        return mean[0], variance[0]

    def test_of_a_stranger_is_standard_normal(self):
        mean, variance = self.outlook(evidence(open_=[0.0]))
        assert (mean, variance) == (pytest.approx(0, abs=1e-6), pytest.approx(1, abs=1e-5))

    @given(st.lists(scores, max_size=5), scores, st.floats(0.05, 2))
    def test_longer_siblings_let_expect_a_longer_response(self, others, score, more):
        short = self.outlook(evidence([*others, score], [0.0]))
        long = self.outlook(evidence([*others, score + more], [0.0]))
        assert long[0] > short[0]

    @given(st.floats(-2, 2), st.integers(2, 15))
    def test_siblings_that_still_run_let_expect_a_longer_response(self, threshold, running):
        alone = self.outlook(evidence(open_=[threshold]))
        among = self.outlook(evidence(open_=[threshold] * running))
        further = self.outlook(evidence(open_=[threshold + 0.5] * running))
        assert alone[0] < among[0] < further[0]
        assert among[1] < alone[1]

    def test_its_own_survival_is_not_evidence(self):
        """The caller's curve is conditional on it: it must not count twice."""
        at_rest, late = (self.outlook(evidence(open_=[z]))[0] for z in (-5.0, 3.0))
        assert at_rest == pytest.approx(late, abs=1e-9)

    def test_only_its_own_siblings_count(self):
        seen = evidence([2.0, 2.0], [0.0, 0.0], ended_of=[1, 1], open_of=[0, 1])
        mean, _ = self.effects.outlook(np.array([7, 8]), seen, 1e-6)
        assert mean[0] == pytest.approx(0, abs=1e-3) and mean[1] > 1

    def test_the_last_epoch_is_remembered_and_fades(self):
        known = replace(
            self.effects, prompt=np.array([7]), mean=np.array([1.0]), variance=np.array([0.1])
        )
        mean, variance = self.outlook(evidence(open_=[-5.0]), effects=known)
        assert mean == pytest.approx(known.persistence) and variance < 1
        assert self.outlook(evidence(open_=[-5.0]), np.array([6]), known)[0] == pytest.approx(0)

    def test_a_shift_of_all_is_seen_by_each(self):
        """Most prompts end earlier than expected: a prompt without news is expected shorter."""
        rng = np.random.default_rng(0)
        of = np.arange(200)
        seen = evidence(rng.normal(-1, 1, 199), [-4.0], ended_of=of[1:], open_of=[0])
        doubtful, _ = self.effects.outlook(of, seen, 1.0)
        sure, _ = self.effects.outlook(of, seen, 1e-9)
        assert doubtful[0] == pytest.approx(-1, abs=0.2) and sure[0] == pytest.approx(0, abs=0.01)


class TestCommon:
    """A whole rollout that differs from what was learned, in level and in spread."""

    @staticmethod
    def outlook(shift: float, spread: float, cut: float) -> tuple[float, float]:
        rng, of = np.random.default_rng(1), np.arange(2000)
        score = rng.normal(shift, spread, 2000)
        is_open = score > cut
        seen = Evidence(score[~is_open], of[~is_open], np.full(is_open.sum(), cut), of[is_open])
        mean, variance = PromptEffects().outlook(of, seen, 1.0)
        return mean[is_open].mean(), np.sqrt(variance[is_open].mean())

    @pytest.mark.parametrize("shift, spread", [(0.0, 1.0), (-1.0, 0.5), (0.7, 1.4)])
    def test_shift_and_stretch_are_found_though_half_still_run(self, shift, spread):
        assert self.outlook(shift, spread, cut=shift) == pytest.approx((shift, spread), abs=0.12)

    def test_when_few_have_ended_little_is_taken_for_granted(self):
        """The first two in a hundred: the level can be told, the spread hardly."""
        mean, spread = self.outlook(0.0, 1.0, cut=-2.0)
        assert abs(mean) < 0.2 and spread == pytest.approx(1, abs=0.1)


class Simulation:
    """Scores by the model's own equation."""

    def __init__(self, share: float, persistence: float, num_prompts: int):
        self.rng = np.random.default_rng(11)
        self.share, self.persistence, self.num_prompts = share, persistence, num_prompts
        self.theta = self.rng.normal(0, np.sqrt(share), num_prompts)

    def epoch(self, samples: int, shift: float = 0.0, cut: float = np.inf) -> Evidence:
        fresh = self.rng.normal(0, np.sqrt(self.share), self.num_prompts)
        kept = self.persistence
        self.theta = kept * self.theta + np.sqrt(1 - kept**2) * fresh
        of = np.repeat(np.arange(self.num_prompts), samples)
        score = shift + self.theta[of] + self.rng.normal(0, np.sqrt(1 - self.share), len(of))
        is_cut = score > cut
        return Evidence(score[~is_cut], of[~is_cut], np.full(is_cut.sum(), cut), of[is_cut])


@pytest.mark.parametrize("share, persistence", [(0.1, 0.9), (0.5, 0.5), (0.8, 0.95)])
def test_share_and_persistence_are_learned(share, persistence):
    simulation, effects = Simulation(share, persistence, 500), PromptEffects()
    ids = np.arange(500)
    for shift in (0.0, 0.4, 0.8, 0.3, 0.0, 0.0):
        effects = effects.updated(ids, simulation.epoch(8, shift), 1.0, keep=0.9)
    assert effects.share == pytest.approx(share, abs=0.08)
    assert effects.persistence == pytest.approx(persistence, abs=0.15)


def test_the_expected_score_is_calibrated():
    """Over the prompts, θ lies about its expectation with the variance claimed; cut ones too."""
    simulation, effects = Simulation(0.5, 0.8, 2000), PromptEffects()
    for _ in range(6):
        effects = effects.updated(np.arange(2000), simulation.epoch(4, cut=1.0), 0.01, keep=0.9)
    mean, variance = effects.expected(np.arange(2000))
    nexts = simulation.epoch(1)
    left = (nexts.ended - mean[nexts.ended_of]) / np.sqrt(variance + 1 - effects.share)
    assert abs(left.mean()) < 0.1 and left.std() == pytest.approx(1, abs=0.06)
    assert np.corrcoef(nexts.ended, mean[nexts.ended_of])[0, 1] > 0.4


def test_prompts_without_siblings_teach_no_share():
    effects = PromptEffects().updated(
        np.arange(50), evidence(np.ones(50), ended_of=np.arange(50)), 1.0, keep=0.9
    )
    assert effects.share == PromptEffects().share and len(effects.prompt) == 50


def test_memory_is_bounded_and_keeps_the_first(monkeypatch):
    monkeypatch.setattr(prompt_effects, "MAX_PROMPTS", 10)
    effects = PromptEffects()
    for start in (90, 0, 40):
        ids = np.arange(start, start + 6)
        seen = evidence(np.full(6, start / 90), ended_of=np.arange(6))
        effects = effects.updated(ids, seen, 1e-6, keep=0.9)
    assert effects.prompt.tolist() == [0, 1, 2, 3, 90, 91, 92, 93, 94, 95]
    again = effects.updated(np.array([93]), evidence([-2.0]), 1e-6, keep=0.9)
    assert again.mean[7] < effects.mean[7] and len(again.prompt) == 10
    np.testing.assert_array_equal(np.delete(again.mean, 7), np.delete(effects.mean, 7))
