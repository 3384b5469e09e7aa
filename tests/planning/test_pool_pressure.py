"""Pools that do not hold every sequence: steps and rows against plain sums, and replays of real lengths."""

from dataclasses import replace

import numpy as np
import pytest
from fakes import SPLITS, make_load
from hypothesis import given
from hypothesis import strategies as st
from made_up_memory import PAGE, make_memory

from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.drafting import PoolPressure
from pat_jax.planning.planner.forecast import Forecast

DP8, _, _, TP8 = SPLITS
CAP = 480


def lengths_of(*ended: int) -> LengthModel:
    lengths = np.repeat(ended, 50)
    return LengthModel.empty(CAP, prior_weight=1e-3).updated(lengths, lengths >= CAP)


def forecast(
    running: int,
    lengths: LengthModel,
    waiting: int = 0,
    *,
    generated: int = 0,
    rows_vary: bool = False,
) -> Forecast:
    load = make_load(running, DP8, generated=generated, remaining_tokens=CAP - generated)
    load = replace(load, waiting=waiting)
    current = DP8 if waiting else None
    return Forecast.of(load, lengths, SPLITS, current, 48, rows_vary=rows_vary)


@given(st.integers(1, 32), st.sampled_from([(CAP,), (20, 200), (5, 60, CAP)]))
def test_pools_with_room_for_all_change_nothing(running, ended):
    seen = forecast(running, lengths_of(*ended))
    for memory in (None, make_memory(1e9, pages=10_000)):
        turns = PoolPressure.of(seen, SPLITS, memory)
        np.testing.assert_array_equal(turns.steps, np.tile(seen.steps, (4, 1)))
        np.testing.assert_allclose(turns.rows, seen.fullest)
        np.testing.assert_array_equal(turns.context, np.tile(seen.context, (4, 1)))
        assert not turns.again.any()


@pytest.mark.parametrize("pages", [40, 66, 100])
def test_as_many_steps_as_all_tokens_held_fill_the_pools(pages: int):
    """32 sequences of 480 tokens each, one by one: what they hold over all steps, over what there is."""
    memory = make_memory(1e9, pages=pages)
    seen = forecast(32, lengths_of(CAP))
    turns = PoolPressure.of(seen, SPLITS, memory)
    held = sum(32 * (9 + step + PAGE / 2) for step in range(CAP))
    mean = 9 + CAP / 2
    for i, split in enumerate(SPLITS):
        room = split.dp * (PAGE * (memory.pages[split] - 1) - mean / 2)
        expected = max(CAP, held / room)
        assert turns.steps[i].sum() == pytest.approx(expected, rel=0.25)
        assert (turns.steps[i] >= seen.steps).all()
        assert (
            turns.running[i] * (seen.mean_context + PAGE / 2)
            <= 1.001 * split.dp * PAGE * memory.pages[split]
        ).all()


def test_who_waits_for_pages_finds_some_when_the_long_ones_end():
    """Sixteen of 430 tokens fill the pools; of those that follow most are short."""
    memory, lengths = make_memory(1e9, pages=60), lengths_of(20, 20, 20, CAP)
    turns = [
        PoolPressure.of(forecast(16, lengths, 200, generated=done, rows_vary=True), SPLITS, memory)
        for done in (0, 420)
    ]
    for late in (20, 24):  # TP8 has the pool of one of two replicas of TP4
        assert (turns[1].running[:3, late] > 20).all()
        assert (turns[0].running[:, late] < 17).all()  # more than now only if each holds less
    fixed = forecast(16, lengths, 200)
    assert fixed.fullest[0, 0, 24] == 2.0  # of rows that are all there are
