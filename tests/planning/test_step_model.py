"""Times between and past measured points: exact where measured, in range between, never falling."""

import json
from dataclasses import replace

import numpy as np
import pytest
from fakes import SPLITS, made_up_latency
from hypothesis import given
from hypothesis import strategies as st
from scipy.interpolate import RegularGridInterpolator

from pat_jax.engine.sequences.prefill_calls import Spans, prefill_calls
from pat_jax.planning.latency.model import LatencyModel
from pat_jax.planning.latency.step_model import Physics, Surface
from pat_jax.planning.types import Split

SIZES = st.lists(st.integers(1, 5000), min_size=1, max_size=6, unique=True).map(sorted)
SECONDS = st.floats(1e-6, 10.0)
ROUNDING = 1 + 1e-9


@st.composite
def grids(draw, *, is_rising: bool = False) -> tuple[list[int], list[int], np.ndarray]:
    """Rows, lengths and seconds[row, length]."""
    rows, lengths = draw(SIZES), draw(SIZES)
    count = len(rows) * len(lengths)
    seconds = np.reshape(draw(st.lists(SECONDS, min_size=count, max_size=count)), (len(rows), -1))
    return rows, lengths, seconds.cumsum(axis=0).cumsum(axis=1) if is_rising else seconds


def surface(rows: list[int], lengths: list[int], seconds: np.ndarray) -> Surface:
    return Surface(
        {(n, m): float(seconds[i, j]) for i, n in enumerate(rows) for j, m in enumerate(lengths)}
    )


@given(grids())
def test_a_measured_point_costs_what_was_measured(grid):
    fitted = surface(*grid)
    assert {at: fitted(*at) for at in fitted.points} == fitted.points


@given(grids(), st.floats(0, 1), st.floats(0, 1))
def test_between_measured_points_lie_straight_lines(grid, row_share, length_share):
    rows, lengths, seconds = grid
    n = round(rows[0] + row_share * (rows[-1] - rows[0]))
    m = round(lengths[0] + length_share * (lengths[-1] - lengths[0]))
    axes = tuple(np.array(steps, float) for steps in (rows, lengths) if len(steps) > 1)
    at = [x for x, steps in ((n, rows), (m, lengths)) if len(steps) > 1]
    if axes:
        expected = RegularGridInterpolator(axes, seconds.squeeze())(at).item()
        assert surface(*grid)(n, m) == pytest.approx(expected)
    i, j = np.searchsorted(rows, n), np.searchsorted(lengths, m)
    around = seconds[max(i - 1, 0) : i + 1, max(j - 1, 0) : j + 1]
    assert around.min() / ROUNDING <= surface(*grid)(n, m) <= around.max() * ROUNDING


@given(grids(is_rising=True), *[st.integers(1, 20_000)] * 4)
def test_more_work_never_costs_less_where_none_did(grid, n, more_n, m, more_m):
    """Within the grid, past its ends and below it."""
    fitted = surface(*grid)
    (n, more_n), (m, more_m) = sorted((n, more_n)), sorted((m, more_m))
    assert 0 < fitted(n, m) <= fitted(more_n, more_m) * ROUNDING


@given(grids(), *[st.integers(0, 20_000)] * 4)
def test_past_the_last_point_times_never_fall_however_noisy(grid, n, more_n, m, more_m):
    rows, lengths, _ = grid
    fitted = surface(*grid)
    (n, more_n), (m, more_m) = sorted((n, more_n)), sorted((m, more_m))
    for row in rows:
        line = [fitted(row, lengths[-1] + extra) for extra in (0, m, more_m)]
        assert line[0] <= line[1] * ROUNDING and line[1] <= line[2] * ROUNDING
    for length in lengths:
        line = [fitted(rows[-1] + extra, length) for extra in (0, n, more_n)]
        assert line[0] <= line[1] * ROUNDING and line[1] <= line[2] * ROUNDING


@given(st.floats(1e-4, 1e-1), st.floats(0, 1e-3), st.floats(0, 1e-6))
def test_a_step_that_is_physics_is_predicted_beyond_the_profile(fixed, per_row, per_token):
    """Up to four times the rows and the length of the largest measured point."""
    truth = Physics(fixed, per_row, per_token)
    rows, lengths = (1, 2, 4, 8, 16, 32, 64), (256, 512, 1024, 2048, 4096)
    measured = Surface({(n, m): truth(n, m) for n in rows for m in lengths})
    for n, m in ((24, 8192), (64, 16_384), (256, 4096), (256, 16_384)):
        assert measured(n, m) == pytest.approx(truth(n, m), rel=0.02)


def test_one_point_grows_with_the_work_but_less_than_in_proportion():
    """Nothing tells its parts apart: they are taken to be equal."""
    alone = Surface({(8, 100): 3.0})
    assert alone(4, 50) == alone(8, 50) == 3.0  # what the smallest bucket costs
    assert alone(16, 100) == pytest.approx(5.0)  # two parts of three grow with the rows
    assert alone(8, 200) == pytest.approx(4.0)
    assert alone(16, 200) == pytest.approx(7.0)


def test_a_grid_may_have_holes():
    """An interrupted measurement: the rows of the longer cache are not all there."""
    truth = Physics(1.0, 0.1, 0.001)
    known = {(n, m): truth(n, m) for n in (4, 8, 16) for m in (64, 128)}
    del known[8, 64], known[16, 128]
    partial = Surface(known)
    for n in (4, 8, 16):
        for m in (64, 128):
            assert partial(n, m) == pytest.approx(truth(n, m), rel=0.25)
    assert partial(8, 128) == known[8, 128]


@given(grids())
def test_no_part_of_the_physics_is_negative(grid):
    fitted = surface(*grid).physics
    assert min(fitted.fixed, fitted.per_row, fitted.per_token) >= 0
    assert max(fitted.fixed, fitted.per_row, fitted.per_token) > 0


DP2, TP2 = Split(2, 1), Split(1, 2)
MODEL = LatencyModel(
    decode_table={
        (DP2, 4, 64): 1.0,
        (DP2, 8, 64): 2.0,
        (DP2, 4, 128): 3.0,
        (DP2, 8, 128): 5.0,
        (TP2, 8, 64): 1.5,
    },
    reshard_table={(DP2, TP2): 10.0, (TP2, DP2): 20.0},
    migrate_table={
        (DP2, TP2, "all"): 6.0,
        (DP2, TP2, "one"): 4.0,
        (TP2, DP2, "all"): 7.0,
        (TP2, DP2, "one"): 5.0,
    },
    prefill_table={(TP2, 64): 0.5, (TP2, 128): 0.75},
    prefill_blocks=8,
    page_size=16,
    round_tokens=16,
)


@pytest.mark.parametrize(
    "rows, length, seconds",
    [
        (1, 1, 1.0),  # the smallest bucket runs whatever is less
        (4, 64, 1.0),
        (5, 64, 2.0),
        (4, 65, 3.0),
        (8, 128, 5.0),
    ],
)
def test_a_decode_step_costs_what_its_bucket_costs(rows, length, seconds):
    assert MODEL.decode_step(DP2, rows, length) == seconds


@pytest.mark.parametrize(
    "fullest, running, context, seconds",
    [
        (4, 8, 16, 4 * 6.0),  # alike: both replicas in every round
        (5, 8, 16, 3 * 6.0 + 2 * 4.0),  # one has two rows more than the other
        (8, 8, 16, 8 * 4.0),  # all in one
        (4, 8, 40, 4 * 6.0 * 2.5),
    ],
)
def test_a_migration_costs_rounds_of_all_groups_and_of_one(fullest, running, context, seconds):
    assert MODEL.migrate(DP2, TP2, fullest, running, context) == seconds


@given(st.integers(1, 40), st.integers(1, 128))
def test_recomputing_costs_the_calls_that_the_engine_makes(rows, length):
    every = np.arange(rows)
    spans = Spans(every, 0 * every, 0 * every, 0 * every + length)
    calls = prefill_calls(spans, num_replicas=1, sizes=(8, 8), page_size=16)
    expected = sum(0.5 if call.context <= 64 else 0.75 for call in calls)
    assert MODEL.recompute(TP2, rows, length) == pytest.approx(expected)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 128)), min_size=1, max_size=40))
def test_prompts_cost_the_calls_that_the_engine_packs_them_into(prompts):
    """Of any lengths, in any replicas; past the last bucket a context is known to the page."""
    model = made_up_latency(
        {SPLITS[1]: 1.0}, {SPLITS[1]: 0.1}, reshard=1.0, migrate_per_token=1.0, lengths=(64, 128)
    )
    model = replace(model, prefill_table={(SPLITS[1], 64): 0.5, (SPLITS[1], 128): 0.75})
    replica, tokens = np.array(prompts).T
    spans = Spans(np.arange(len(replica)), replica, 0 * tokens, tokens)
    calls = prefill_calls(spans, num_replicas=4, sizes=(8, 8), page_size=16)
    expected = sum(model.prefill_call(SPLITS[1], call.context) for call in calls)
    assert model.packed(SPLITS[1], replica, tokens) == pytest.approx(expected)


class TestOtherBuckets:
    """An engine whose buckets are not those of the profile."""

    ROWS, LENGTHS = {DP2: (4, 6, 16)}, (64, 96, 256)

    def profiled(self) -> LatencyModel:
        return replace(MODEL, prefill_table={(DP2, 64): 0.5, (DP2, 128): 0.75, (TP2, 64): 1.0})

    def test_its_tables_hold_every_bucket_and_no_other(self):
        model = self.profiled().on(self.ROWS, self.LENGTHS)
        assert set(model.decode_table) == {
            (DP2, n, m) for n in self.ROWS[DP2] for m in self.LENGTHS
        }
        assert set(model.prefill_table) == {(DP2, m) for m in self.LENGTHS}
        assert model.migrate_table == MODEL.migrate_table

    def test_what_was_measured_stays_and_the_rest_lies_between(self):
        model = self.profiled().on(self.ROWS, self.LENGTHS)
        assert model.decode_table[DP2, 4, 64] == 1.0 and model.prefill_table[DP2, 64] == 0.5
        assert model.decode_table[DP2, 6, 64] == pytest.approx(1.5)
        assert model.decode_table[DP2, 6, 96] == pytest.approx((1 + 2 + 3 + 5) / 4)
        assert model.prefill_table[DP2, 96] == pytest.approx(0.625)
        assert model.decode_table[DP2, 16, 64] > 2.0 and model.decode_table[DP2, 4, 256] > 3.0
        assert model.prefill_table[DP2, 256] > 0.75

    def test_a_load_costs_what_its_bucket_here_costs(self):
        """Not what a bucket of the profile costs that no program was compiled for."""
        model = self.profiled().on(self.ROWS, self.LENGTHS)
        assert model.decode_step(DP2, 7, 64) == model.decode_table[DP2, 16, 64]
        assert self.profiled().decode_step(DP2, 7, 64) == 2.0

    def test_drafts_measured_in_short_contexts_only_grow_by_what_steps_without_them_grow(self):
        verify = {(DP2, 4, 64, 3): 2.0, (DP2, 8, 64, 3): 3.0}
        model = replace(MODEL, verify_table=verify).on({DP2: (4, 6, 8)}, (32, 64, 96, 128))
        seconds = model.verify_table
        assert seconds[DP2, 4, 32, 3] == seconds[DP2, 4, 64, 3] == 2.0
        assert seconds[DP2, 4, 128, 3] == pytest.approx(2.0 + (3.0 - 1.0))
        assert seconds[DP2, 6, 96, 3] == pytest.approx(2.5 + (1 + 2 + 3 + 5) / 4 - 1.5)
        known = replace(
            MODEL, verify_table={**verify, (DP2, 4, 128, 3): 7.0, (DP2, 8, 128, 3): 9.0}
        )
        assert known.on({DP2: (4, 6)}, (64, 128)).verify_table[DP2, 6, 128, 3] == pytest.approx(8.0)

    def test_a_layout_nobody_measured_is_not_guessed(self):
        alone = Split(1, 1)
        model = MODEL.on({alone: (4,), DP2: (4,)}, (64,))
        assert model.decode_table == {(DP2, 4, 64): 1.0}
        with pytest.raises(KeyError):
            model.decode_step(alone, 4, 64)


def through_json(model: LatencyModel) -> LatencyModel:
    return LatencyModel.from_json(json.loads(json.dumps(model.to_json())))


def test_a_model_comes_back_from_json():
    assert through_json(MODEL) == MODEL
    random = made_up_latency(
        {split: float(np.pi) / split.tp for split in SPLITS},
        dict.fromkeys(SPLITS, 1 / 3),
        reshard=0.1,
        migrate_per_token=0.7,
    )
    assert through_json(random) == random


def test_steps_that_verify_drafts_from_elsewhere_are_not_taken_for_ones_own():
    """What finds or says the drafts is in their times."""
    copied = replace(MODEL, verify_table={(DP2, 4, 64, 3): 1.5})
    output = replace(copied, drafts_from="the first 2 layers")
    assert through_json(output) == output != copied
    assert copied.of_drafts_from("texts") is copied
    other = output.of_drafts_from("texts")
    assert (other.num_draft_tokens, other.drafts_from) == ((), "texts")
    assert other.decode_table == output.decode_table
    assert output.covers(output) and not copied.covers(output) and not output.covers(copied)
    assert output.covers(MODEL)  # which has none
