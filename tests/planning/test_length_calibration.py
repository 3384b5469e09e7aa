"""Predicted bands of the remaining length hold what they claim, on prompts never seen."""

import numpy as np
import pytest
from scipy.special import ndtr

from pat_jax.planning.lengths.model import LengthModel


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
