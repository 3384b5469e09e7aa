"""Sequences counted together must be forecast as if they had been looked at one by one."""

import math
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from fakes import SPLITS, made_up_latency, make_load
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.planning.lengths.baseline import Baseline
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner import budget
from pat_jax.planning.planner.forecast import MAX_CLASSES, Forecast, SequenceClasses, moment_edges
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.planning.planner.refill import MOST_TURNS
from pat_jax.planning.planner.scripts import ScriptedPath, Step
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


QUEUE_CAP, ROWS = 400, 64
SEEN_BEFORE = np.clip(np.random.default_rng(0).lognormal(4, 0.8, 4000).astype(int), 1, QUEUE_CAP)
QUEUE_LENGTHS = LengthModel.empty(QUEUE_CAP).updated(SEEN_BEFORE, SEEN_BEFORE >= QUEUE_CAP)


def lived(waiting: int, seed: int) -> np.ndarray:
    """Running sequences after each step, when `waiting` take the rows of those that end."""
    rng = np.random.default_rng(seed)
    left, running = rng.choice(SEEN_BEFORE, ROWS), []
    while len(left):
        running.append(len(left))
        left = left[left > 1] - 1
        entering = min(ROWS - len(left), waiting)
        waiting -= entering
        left = np.concatenate([left, rng.choice(SEEN_BEFORE, entering)])
    return np.array(running)


@pytest.mark.parametrize("waiting", [20, 200, MOST_TURNS * ROWS])
def test_rows_are_full_as_long_as_they_are_in_rollouts(waiting):
    load = replace(make_load(ROWS, TP8, remaining_tokens=QUEUE_CAP), waiting=waiting)
    seen = Forecast.of(load, QUEUE_LENGTHS, SPLITS, TP8, 48)
    longer = Forecast.of(replace(load, waiting=waiting + 1), QUEUE_LENGTHS, SPLITS, TP8, 48)
    assert (longer.steps.sum() > seen.steps.sum()) == (waiting < MOST_TURNS * ROWS)
    rollouts = [lived(waiting, seed) for seed in range(20)]
    moments = np.cumsum(seen.steps) - seen.steps
    for share in (0.95, 0.5, 0.2):
        expected = np.mean([np.flatnonzero(running >= share * ROWS).max() for running in rollouts])
        last = np.flatnonzero(seen.running >= share * ROWS).max()
        # Between the two moments around it, give or take a tenth.
        assert moments[last] <= 1.1 * expected
        assert moments[last] + seen.steps[last] >= 0.9 * expected
    assert seen.fullest[:, SPLITS.index(TP8), 0].tolist() == [ROWS] * 3
    assert (seen.fullest <= ROWS).all() and (seen.running <= ROWS * (1 + 1e-9)).all()


def test_the_caches_of_a_queue_do_not_grow_with_time():
    load = make_load(ROWS, TP8, remaining_tokens=QUEUE_CAP, prompt=10)
    alone = Forecast.of(load, QUEUE_LENGTHS, SPLITS, TP8, 48)
    queued = Forecast.of(replace(load, waiting=2000), QUEUE_LENGTHS, SPLITS, TP8, 48)
    assert alone.mean_context[-1] > 0.9 * QUEUE_CAP
    assert queued.mean_context.max() < QUEUE_CAP + 10 and queued.context.max() <= QUEUE_CAP + 10
    steady = queued.mean_context[20:30].mean() - 10
    # The age of what lives at any moment (renewal theory); who came between two counts as younger.
    assert steady == pytest.approx((SEEN_BEFORE**2.0).mean() / SEEN_BEFORE.mean() / 2, rel=0.2)


def test_the_layout_of_a_tail_is_left_for_a_queue():
    """0.2 s a step lost while rows are full, 0.7 s saved in the tail, 9.6 s to go and 9.6 s back."""
    ends = np.repeat([50, QUEUE_CAP], [95, 5])
    lengths = LengthModel(Baseline.empty(QUEUE_CAP, 1e-3)).updated(ends, np.zeros(100, bool))
    latency = made_up_latency(
        {DP8: 0.8, TP8: 0.05},
        {DP8: 0.001, TP8: 0.01},
        reshard=8.0,
        migrate_per_token=0.0,
        max_rows=128,
        lengths=(1024,),
    )
    load = make_load(96, TP8, remaining_tokens=QUEUE_CAP)
    for waiting, split in ((0, TP8), (600, DP8)):
        planner = CostModelPlanner((DP8, TP8), latency, lengths)
        with patch.object(budget, "SHARE", math.inf):
            assert planner.decide(replace(load, waiting=waiting), TP8).split == split


def test_a_script_counts_those_that_wait():
    planner = ScriptedPath(DP8, (Step(TP8, 12),))
    load = make_load(8, DP8)
    assert planner.decide(replace(load, waiting=5), DP8).split == Split(8, 1)
    assert planner.decide(replace(load, waiting=4), DP8).split == TP8


@pytest.mark.parametrize(("running", "waiting"), [(2, 1), (10, 5), (8, 1)])
def test_a_queue_behind_sequences_that_are_nearly_through(running, waiting):
    """Whoever waits may have ended before the horizon: no moment is without numbers."""
    near = make_load(running, DP8, generated=QUEUE_CAP - 10, remaining_tokens=10)
    seen = Forecast.of(replace(near, waiting=waiting), QUEUE_LENGTHS, SPLITS, DP8, 48)
    for name in ("any_running", "running", "context", "mean_context", "fullest"):
        assert np.isfinite(getattr(seen, name)).all()
