"""Predicted bands of the remaining length hold what they claim, on prompts never seen."""

import numpy as np
import pytest
from scipy.special import ndtr

from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.types import Siblings


class TestCalibration:
    """Lengths by the documented hierarchy, of prompts never seen: bands hold what they claim."""

    @staticmethod
    def rollout(rng, level, samples):
        lengths = np.repeat(level, samples) * rng.lognormal(0, 0.4, samples * len(level))
        return np.minimum(lengths.astype(int) + 1, 2000)

    def places(self, is_informed: bool) -> np.ndarray:
        """Where each length fell in its predicted distribution; even on [0, 1] if calibrated."""
        rng, model = np.random.default_rng(8), LengthModel.empty(2000)
        for i in range(6):
            level = rng.lognormal(6, 0.6, 128)
            lengths = self.rollout(rng, level, 8)
            model = model.updated(lengths, lengths == 2000, 1000 * i + np.repeat(np.arange(128), 8))
        lengths = self.rollout(rng, rng.lognormal(6, 0.6, 256), 8)
        of, now = np.repeat(np.arange(256), 8), 400
        live, done = lengths > now, lengths <= now
        known = Siblings(
            10**6 + np.arange(256), of[live], of[done], lengths[done], np.zeros(done.sum(), bool)
        )
        alive = model.survival(
            np.full(live.sum(), now),
            np.full(live.sum(), 2000 - now),
            np.arange(1600),
            known if is_informed else None,
        )
        left = lengths[live] - now
        below = np.take_along_axis(alive, (left - 1)[:, None], axis=1)[:, 0]
        above = np.take_along_axis(alive, np.minimum(left, 1599)[:, None], axis=1)[:, 0]
        above = np.where(lengths[live] == 2000, 0.0, above)
        return 1 - (above + rng.random(live.sum()) * (below - above))

    @pytest.mark.parametrize("is_informed", [False, True])
    def test_half_falls_in_the_middle_half_and_nine_tenths_in_the_middle_nine(self, is_informed):
        place = self.places(is_informed)
        assert np.mean((place > 0.25) & (place < 0.75)) == pytest.approx(0.5, abs=0.06)
        assert np.mean((place > 0.05) & (place < 0.95)) == pytest.approx(0.9, abs=0.04)


@pytest.mark.parametrize("times", [2.0, 4.0, 0.5])
def test_lengths_that_jump_are_not_overshot_and_the_mass_at_the_cap_is_known(times):
    """Ten rollouts of 1,024 log-normal responses, then so many times as long; the cap at 8,192."""
    rng, cap, spread = np.random.default_rng(0), 8192, 0.8
    model, ask = LengthModel.empty(cap), (np.zeros(1, int), np.array([cap]))
    for i in range(20):
        median = 900 * (times if i >= 10 else 1)
        if i > 10:
            alive = model.survival(*ask, np.array([round(median), cap - 1]))[0]
            truth = ndtr((np.log(median) - np.log(cap)) / spread)
            assert alive[0] == pytest.approx(0.5, abs=0.06)
            assert alive[1] == pytest.approx(truth, rel=0.25, abs=0.002)
        lengths = np.clip(rng.lognormal(np.log(median), spread, 1024), 1, cap).astype(int)
        model = model.updated(lengths, lengths == cap)
