"""A queue's forecast against rollouts with a queue, drawn from the same lengths."""

import math
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from fakes import SPLITS, made_up_latency, make_load

from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner import budget
from pat_jax.planning.planner.forecast import Forecast
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.planning.planner.refill import MOST_TURNS
from pat_jax.planning.planner.scripts import ScriptedPath, Step
from pat_jax.planning.types import Split

CAP, ROWS = 400, 64
DP8, _, _, TP8 = SPLITS
SEEN = np.clip(np.random.default_rng(0).lognormal(4, 0.8, 4000).astype(int), 1, CAP)
LENGTHS = LengthModel.empty(CAP).updated(SEEN, SEEN >= CAP)


def lived(waiting: int, seed: int) -> np.ndarray:
    """Running sequences after each step, when `waiting` take the rows of those that end."""
    rng = np.random.default_rng(seed)
    left, running = rng.choice(SEEN, ROWS), []
    while len(left):
        running.append(len(left))
        left = left[left > 1] - 1
        entering = min(ROWS - len(left), waiting)
        waiting -= entering
        left = np.concatenate([left, rng.choice(SEEN, entering)])
    return np.array(running)


@pytest.mark.parametrize("waiting", [20, 200, MOST_TURNS * ROWS])
def test_rows_are_full_as_long_as_they_are_in_rollouts(waiting):
    load = replace(make_load(ROWS, TP8, remaining_tokens=CAP), waiting=waiting)
    seen = Forecast.of(load, LENGTHS, SPLITS, TP8, 48)
    longer = Forecast.of(replace(load, waiting=waiting + 1), LENGTHS, SPLITS, TP8, 48)
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
    load = make_load(ROWS, TP8, remaining_tokens=CAP, prompt=10)
    alone = Forecast.of(load, LENGTHS, SPLITS, TP8, 48)
    queued = Forecast.of(replace(load, waiting=2000), LENGTHS, SPLITS, TP8, 48)
    assert alone.mean_context[-1] > 0.9 * CAP
    assert queued.mean_context.max() < CAP + 10 and queued.context.max() <= CAP + 10
    steady = queued.mean_context[20:30].mean() - 10
    # The age of what lives at any moment (renewal theory); who came between two counts as younger.
    assert steady == pytest.approx((SEEN**2.0).mean() / SEEN.mean() / 2, rel=0.2)


def test_the_layout_of_a_tail_is_left_for_a_queue():
    """0.2 s a step lost while rows are full, 0.7 s saved in the tail, 9.6 s to go and 9.6 s back."""
    ends = np.repeat([50, CAP], [95, 5])
    lengths = LengthModel.empty(CAP, prior_weight=1e-3).updated(ends, np.zeros(100, bool))
    latency = made_up_latency(
        {DP8: 0.8, TP8: 0.05},
        {DP8: 0.001, TP8: 0.01},
        reshard=8.0,
        migrate_per_token=0.0,
        max_rows=128,
        lengths=(1024,),
    )
    load = make_load(96, TP8, remaining_tokens=CAP)
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
    near = make_load(running, DP8, generated=CAP - 10, remaining_tokens=10)
    seen = Forecast.of(replace(near, waiting=waiting), LENGTHS, SPLITS, DP8, 48)
    for name in ("any_running", "running", "context", "mean_context", "fullest"):
        assert np.isfinite(getattr(seen, name)).all()
