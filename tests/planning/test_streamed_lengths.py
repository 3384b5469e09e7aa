"""What a stream of requests lets expect while it runs, against lengths that are known."""

import numpy as np
import pytest

from pat_jax.planning.lengths.model import LengthModel, StreamedLengths

CAP, ROWS, MEDIAN = 4096, 64, 400


def after(steps: int, lengths: np.ndarray) -> StreamedLengths:
    """So many decode steps into a stream whose rows are filled again as soon as they are free."""
    seen = StreamedLengths(LengthModel.empty(CAP), len(lengths))
    free_at = np.zeros(ROWS, int)
    for i, length in enumerate(lengths):
        row = int(free_at.argmin())
        begin, free_at[row] = int(free_at[row]), free_at[row] + length
        if begin < steps:
            seen.note(i, min(length, steps - begin), has_ended=begin + length <= steps)
    return seen


def share_longer(model: LengthModel, tokens: int) -> float:
    return float(model.survival(np.array([0]), np.array([CAP]), np.array([tokens]))[0, 0])


@pytest.mark.parametrize("steps", [200, 400, 1000, 4000])
def test_half_are_expected_to_be_longer_than_the_median_at_every_moment(steps):
    """At 400 steps those that have ended alone would say 0.04, an empty model 0.82."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(MEDIAN), 0.7, 2048).astype(int), 1, CAP - 1)
    seen = after(steps, lengths)
    at = np.minimum(MEDIAN, steps)
    truth = float((lengths > at).mean())
    assert share_longer(seen.model(), at) == pytest.approx(truth, abs=0.08)


def test_what_is_cut_is_longer_and_what_is_stopped_has_ended():
    cut, stopped = (StreamedLengths(LengthModel.empty(CAP, 1e-6), 4) for _ in range(2))
    for i in range(4):
        cut.note(i, 100, has_ended=i == 0)
        stopped.note(i, 100, has_ended=True)  # a stop string in it
        stopped.note(i, 100, has_ended=False)  # and no token that ends it
    assert share_longer(cut.model(), 100) == pytest.approx(0.75, abs=0.01)
    assert share_longer(stopped.model(), 100) == pytest.approx(0, abs=0.01)


def test_requests_that_have_not_begun_say_nothing():
    before = LengthModel.empty(CAP)
    assert StreamedLengths(before, 5).model() is before
