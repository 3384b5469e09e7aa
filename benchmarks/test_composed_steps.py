"""Composed steps against published ones of TPUs."""

from statistics import fmean

import pytest

from benchmarks.composed_steps import (
    BATCHES,
    crossover,
    measured_speed_ups,
    speed_ups,
    tpu_steps,
)


def test_steps_of_a_large_model_on_tpus_are_near_the_published_ones():
    """Llama-3.1-70B on a v5e-16, weights and KV cache in int8."""
    errors = [step.error for step in tpu_steps()]
    assert fmean(map(abs, errors)) < 10
    assert max(map(abs, errors)) < 25


def test_one_wide_group_of_tpus_wins_and_loses_where_it_was_measured_to():
    measured = measured_speed_ups()
    assert speed_ups(2048) == pytest.approx(measured, rel=0.15)
    assert crossover(speed_ups(2048)) == pytest.approx(crossover(measured), rel=0.25)
    for length in (256, 1024, 2048):
        gains = speed_ups(length)
        assert gains == sorted(gains, reverse=True) and len(gains) == len(BATCHES)
