"""What a run learns of step times: factors of layouts, and what all of them share."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from fakes import SPLITS, made_up_latency, ran
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.planning.latency.correction import Correction
from pat_jax.planning.latency.model import LatencyModel
from pat_jax.planning.types import BurstResult, Split

DP8, DP4TP2, DP2TP4, TP8 = SPLITS
MODEL = made_up_latency(
    dict(zip(SPLITS, (1.0, 1.2, 1.4, 1.5), strict=True)),
    dict.fromkeys(SPLITS, 0.1),
    reshard=1.0,
    migrate_per_token=0.1,
)
FAST = replace(MODEL, decode_table={k: s / 100 for k, s in MODEL.decode_table.items()})


def factor(model: LatencyModel, split: Split = DP8) -> float:
    return model.correction.factor(split)


def taught(model: LatencyModel, split: Split, ratios: Sequence[float]) -> LatencyModel:
    """Having seen bursts of 8 rows that took so many times what the profile says."""
    for ratio in ratios:
        model = model.observed(ran(split, 8, 64, ratio * model.profiled_step(split, 8, 64)))
    return model


@pytest.mark.parametrize("seen, doubt", [(0.8, 0.8), (1.0, 1.0), (1.44, 1 / 1.2)])
def test_a_layout_not_seen_yet_gets_the_benefit_of_the_doubt(seen, doubt):
    """All of it where another was faster than profiled, half of the error where it was slower."""
    model = taught(MODEL, DP8, [seen] * 50)
    assert factor(model, TP8) == pytest.approx(doubt, rel=1e-3)
    model = taught(model, TP8, [1.1] * 50)
    assert factor(model, TP8) == pytest.approx(1.1, rel=1e-3)  # its own, now that it is seen


@pytest.mark.parametrize("seen", [0.8, 1.44])
def test_soberly_a_layout_not_seen_yet_is_as_far_off_as_the_others(seen):
    correction = taught(MODEL, DP8, [seen] * 50).correction
    sober = dict(zip(SPLITS, correction.sober_factors(SPLITS), strict=True))
    assert sober[TP8] == pytest.approx(seen, rel=1e-3)
    assert sober[DP8] == correction.factor(DP8)


@given(
    st.floats(0.55, 1.9),
    st.lists(st.floats(-0.05, 0.05), min_size=12, max_size=12),
    st.sampled_from([1e-6, 0.5, 2.0, 1e6]),
)
def test_one_odd_burst_hardly_moves_a_factor(drift, noise, odd):
    """The first of all by less than a fifth, any other by less than a tenth."""
    ratios = [min(max(drift + one, 0.5), 2.0) for one in noise]
    for count, most in ((0, 0.2), (len(ratios), 0.1)):
        before = taught(MODEL, DP8, ratios[:count])
        after = taught(before, DP8, [factor(before) * odd])
        assert abs(factor(after) / factor(before) - 1) < most


@given(st.floats(0.5, 2.0), st.lists(st.floats(0.9, 1.1), max_size=8))
def test_a_lasting_change_is_known_after_five_bursts(drift, before):
    model = taught(MODEL, DP8, before)
    assert abs(np.log(factor(taught(model, DP8, [drift] * 5)) / drift)) <= 0.1
    assert abs(np.log(factor(taught(model, DP8, [drift] * 20)) / drift)) <= 0.01


@pytest.mark.parametrize("ratio, limit", [(1e6, 2.0), (1e-6, 0.5)])
def test_more_than_a_factor_of_two_is_not_believed(ratio, limit):
    model = taught(MODEL, DP8, [ratio] * 300)
    assert factor(model) == pytest.approx(limit)
    assert np.isfinite(model.correction.covariance).all()


class TestShared:
    """Steps of some 20 ms, to which the host adds 14 µs for each running sequence."""

    HOST_S = 14e-6

    def burst(self, split: Split, rows: int, factor: float = 1.0) -> BurstResult:
        running = rows * split.dp * 100
        seconds = factor * FAST.profiled_step(split, rows, 64) + self.HOST_S * running
        return replace(ran(split, rows, 64, seconds), running=running)

    def seen(self, *bursts: BurstResult) -> Correction:
        model = FAST
        for burst in bursts:
            model = model.observed(burst)
        return model.correction

    def test_the_first_burst_favours_no_layout(self):
        """It takes twice its profiled time; a factor would make the others look faster by as much."""
        burst = self.burst(DP8, 2)
        assert burst.step_s > 1.8 * FAST.profiled_step(DP8, 2, 64)
        learned = self.seen(burst)
        assert learned.factor(DP8) / learned.factor(TP8) < 1.1

    def test_it_falls_with_the_sequences_and_leaves_the_factors_alone(self):
        learned = self.seen(*(self.burst(DP8, rows) for rows in (8, 8, 8, 7, 6, 5, 4, 3, 2, 1)))
        assert learned.per_sequence_s == pytest.approx(self.HOST_S, rel=0.1)
        assert learned.factor(DP8) == pytest.approx(1.0, abs=0.05)

    @pytest.mark.parametrize("slow", [0.8, 1.2])
    def test_what_does_not_fall_is_the_layouts_own(self, slow):
        bursts = [self.burst(DP8, rows, slow) for rows in (8, 8, 7, 6, 5, 4, 3, 2, 1)]
        bursts += [self.burst(DP2TP4, rows) for rows in (4, 3, 2, 1)]
        learned = self.seen(*bursts * 6)  # rollouts
        assert learned.factor(DP8) == pytest.approx(slow, abs=0.06)
        assert learned.factor(DP2TP4) == pytest.approx(1.0, abs=0.06)
        assert learned.per_sequence_s == pytest.approx(self.HOST_S, rel=0.3)

    def test_no_sequence_takes_less_than_no_time(self):
        learned = self.seen(*(ran(DP8, 8, 64, 0.7 * FAST.profiled_step(DP8, 8, 64)),) * 20)
        assert learned.per_sequence_s == 0.0
        assert learned.factor(DP8) == pytest.approx(0.7, rel=0.01)
