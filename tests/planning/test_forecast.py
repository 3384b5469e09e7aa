"""Sequences counted together must be forecast as if they had been looked at one by one."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
from fakes import SPLITS
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.forecast import MAX_CLASSES, Forecast, SequenceClasses, moment_edges
from pat_jax.planning.types import Load, Split

CAP = 300
rng = np.random.default_rng(0)
SEEN = np.clip(rng.lognormal(4, 1, 500).astype(int), 1, CAP)
LENGTHS = LengthModel.empty(CAP).updated(SEEN, SEEN >= CAP)
DP8, DP4TP2, DP2TP4, TP8 = SPLITS


def random_load(seed: int, running: int, kinds: int, replicas: int = 8) -> Load:
    """`kinds` different pairs of (generated, budget)."""
    draw = np.random.default_rng(seed)
    generated = draw.integers(0, CAP - 1, kinds)[draw.integers(0, kinds, running)]
    prompt = draw.integers(1, 50, running)
    return Load(draw.integers(0, replicas, running), generated, prompt + generated, CAP - generated)


@given(st.integers(0, 999), st.integers(1, 80), st.integers(1, MAX_CLASSES))
def test_few_kinds_are_counted_exactly(seed, running, kinds):
    load = random_load(seed, running, kinds, replicas=1)
    edges = moment_edges(int(load.remaining_tokens.max()), 20)
    survive = LENGTHS.survival(load.generated, load.remaining_tokens, edges[:-1])
    seen = Forecast.of(load, LENGTHS, SPLITS, TP8, 20)
    # Dealt into one replica, nothing is left to chance but how many there are.
    expected = np.clip(survive.sum(axis=0), 1, running)
    np.testing.assert_allclose(seen.fullest[0, SPLITS.index(TP8)], expected)
    np.testing.assert_allclose(seen.any_running, 1 - np.prod(1 - survive, axis=0), atol=1e-9)
    np.testing.assert_array_equal(seen.steps, np.diff(edges))
    assert seen.context[0] == load.context.max()


@given(st.integers(0, 99))
def test_many_kinds_are_forecast_nearly_as_well(seed):
    load = random_load(seed, 2000, 2000, replicas=1)
    classes = SequenceClasses.of(load, load.generated, MAX_CLASSES)
    assert len(classes.generated) == MAX_CLASSES and classes.count.sum() == 2000
    assert classes.context.max() == load.context.max()
    edges = moment_edges(int(load.remaining_tokens.max()), 20)
    expected = LENGTHS.survival(load.generated, load.remaining_tokens, edges[:-1]).sum(axis=0)
    seen = Forecast.of(load, LENGTHS, SPLITS, TP8, 20).fullest[0, SPLITS.index(TP8)]
    np.testing.assert_allclose(seen, np.maximum(expected, 1), rtol=0.03, atol=2)


@given(st.integers(0, 999), st.integers(1, 80))
def test_groups_that_exist_are_counted_and_merged_as_migration_merges_them(seed, running):
    load = random_load(seed, running, 3)
    now = Forecast.of(load, LENGTHS, SPLITS, DP8, 20).fullest[0, :, 0]
    for split, fullest in zip(SPLITS, now, strict=True):
        assert fullest == np.bincount(load.replica % split.dp).max()


@given(st.integers(0, 999), st.integers(1, 300))
def test_groups_that_moves_keep_even_have_as_many_as_are_live_over_their_number(seed, running):
    load = random_load(seed, running, 3)
    even = Forecast.of(load, LENGTHS, SPLITS, DP8, 20, is_evened=True)
    dp = np.array([split.dp for split in SPLITS])[:, None]
    assert (even.fullest[0, :, 0] <= np.ceil(running / dp[:, 0])).all()
    assert (even.fullest[0] >= np.maximum(even.running / dp, 1) - 1e-9).all()
    assert (even.fullest[0] <= np.maximum(even.running / dp, 1) + 1).all()
    as_they_are = Forecast.of(load, LENGTHS, SPLITS, DP8, 20)
    np.testing.assert_array_equal(even.running, as_they_are.running)
    assert (even.fullest[0, :, 0] <= as_they_are.fullest[0, :, 0]).all()


@given(st.integers(0, 99), st.integers(2, 300), st.sampled_from([0, 1, 2, None]))
def test_rounding_takes_no_root_of_a_negative_number(seed, running, current):
    """Replicas of a third of the sequences, and a probability a rounding above one."""
    splits = Split(6, 1), Split(3, 2), Split(1, 6)
    split = None if current is None else splits[current]
    load = random_load(seed, running, running, replicas=split.dp if split else 1)
    queued = replace(load, waiting=50)
    for rows_vary in (False, True):
        seen = Forecast.of(queued, LENGTHS, splits, split, 20, rows_vary=rows_vary)
        assert np.isfinite(seen.fullest).all()
    alive = LengthModel.survival

    def rounded(*args):
        return alive(*args) * (1 + 2**-52)

    with patch.object(LengthModel, "survival", rounded):
        seen = Forecast.of(load, LENGTHS, splits, split, 20)
    assert np.isfinite(seen.fullest).all()
