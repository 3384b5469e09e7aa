"""The latency model: looked up in buckets, in proportion beyond them, corrected, stored."""

import json
from dataclasses import replace

import numpy as np
import pytest
from fakes import SPLITS, made_up_latency
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.planning.latency import LatencyModel
from pat_jax.planning.types import Split

DP2, TP2 = Split(2, 1), Split(1, 2)
MODEL = LatencyModel(
    decode_table={
        (DP2, 4, 64): 1.0,
        (DP2, 8, 64): 2.0,
        (DP2, 4, 128): 3.0,
        (DP2, 8, 128): 5.0,
        (TP2, 8, 64): 1.5,
    },
    reslice_table={(DP2, TP2): 10.0, (TP2, DP2): 20.0},
    migrate_table={
        (DP2, TP2, "all"): 6.0,
        (DP2, TP2, "one"): 4.0,
        (TP2, DP2, "all"): 7.0,
        (TP2, DP2, "one"): 5.0,
    },
    prefill_table={(TP2, 64): 0.5, (TP2, 128): 0.75},
    prefill_rows=4,
    prefill_chunk=32,
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
        (16, 128, 10.0),  # beyond the table, in proportion
        (8, 256, 10.0),
        (16, 256, 20.0),
    ],
)
def test_a_decode_step_costs_what_its_bucket_costs(rows, length, seconds):
    assert MODEL.decode_step(DP2, rows, length) == seconds


def test_layouts_have_tables_of_their_own():
    assert MODEL.decode_step(TP2, 4, 64) == 1.5
    assert (MODEL.reslice(DP2, TP2), MODEL.reslice(TP2, DP2)) == (10.0, 20.0)
    with pytest.raises(KeyError):
        MODEL.reslice(DP2, DP2)


@pytest.mark.parametrize(
    "fullest, live, context, seconds",
    [
        (4, 8, 16, 4 * 6.0),  # alike: both groups in every round
        (5, 8, 16, 3 * 6.0 + 2 * 4.0),  # one has two rows more than the other
        (8, 8, 16, 8 * 4.0),  # all in one
        (4, 8, 40, 4 * 6.0 * 2.5),
    ],
)
def test_a_migration_costs_rounds_of_all_groups_and_of_one(fullest, live, context, seconds):
    assert MODEL.migrate(DP2, TP2, fullest, live, context) == seconds


def test_a_group_splits_evenly():
    assert MODEL.migrate(TP2, DP2, 8, 8, 16) == 4 * 7.0


@pytest.mark.parametrize(
    "rows, length, calls, each",
    [(1, 1, 1, 0.5), (4, 32, 1, 0.5), (5, 32, 2, 0.5), (4, 33, 2, 0.5), (9, 100, 12, 0.75)],
)
def test_recomputing_costs_whole_calls_of_rows_and_chunks(rows, length, calls, each):
    assert MODEL.recompute(TP2, rows, length) == calls * each


def test_a_chunk_is_no_longer_than_the_cache():
    model = replace(MODEL, prefill_chunk=128)
    assert model.recompute(TP2, 4, 64) == 0.5


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 500), st.integers(1, 500))
def test_more_rows_or_tokens_never_cost_less(rows, more_rows, length, more_length):
    model = made_up_latency(
        dict.fromkeys(SPLITS, 0.01),
        dict.fromkeys(SPLITS, 0.001),
        reslice=1.0,
        migrate_per_token=0.1,
    )
    rows, more_rows = sorted((rows, more_rows))
    length, more_length = sorted((length, more_length))
    for cost in (
        lambda n, t: model.decode_step(SPLITS[0], n, t),
        lambda n, t: model.migrate(SPLITS[0], SPLITS[1], n, 8 * n, t),
        lambda n, t: model.recompute(SPLITS[1], n, t),
    ):
        assert 0 < cost(rows, length) <= cost(more_rows, more_length)


def test_observations_pull_one_layout_towards_what_was_seen():
    model = MODEL
    for _ in range(200):
        model = model.observed(DP2, 4, 64, seconds=1.5)
    assert model.decode_step(DP2, 4, 64) == pytest.approx(1.5)
    assert model.decode_step(DP2, 8, 128) == pytest.approx(7.5)  # the same drift everywhere
    assert MODEL.decode_step(DP2, 4, 64) == 1.0  # values do not change


@pytest.mark.parametrize("seen, doubt", [(0.8, 0.8), (1.0, 1.0), (1.44, 1 / 1.2)])
def test_a_layout_not_seen_yet_gets_the_benefit_of_the_doubt(seen, doubt):
    """All of it where another was faster than profiled, half of the error where it was slower."""
    model = MODEL.observed(DP2, 4, 64, seconds=seen, weight=1.0)
    assert model.decode_step(TP2, 8, 64) == pytest.approx(doubt * 1.5)
    model = model.observed(TP2, 8, 64, seconds=1.6, weight=1.0)
    assert model.decode_step(TP2, 8, 64) == pytest.approx(1.6)  # its own time, now that it is seen


def test_one_observation_moves_by_its_weight():
    assert MODEL.observed(DP2, 4, 64, 1.5, weight=0.2).correction == {DP2: pytest.approx(1.1)}


@pytest.mark.parametrize("seconds, limit", [(1e6, 2.0), (1e-6, 0.5)])
def test_outliers_count_as_a_factor_of_two(seconds, limit):
    model = MODEL
    for _ in range(300):
        model = model.observed(DP2, 4, 64, seconds)
    assert model.decode_step(DP2, 4, 64) == pytest.approx(limit)


def through_json(model: LatencyModel) -> LatencyModel:
    return LatencyModel.from_json(json.loads(json.dumps(model.to_json())))


def test_a_model_comes_back_from_json():
    assert through_json(MODEL) == MODEL
    random = made_up_latency(
        {split: float(np.pi) / split.tp for split in SPLITS},
        dict.fromkeys(SPLITS, 1 / 3),
        reslice=0.1,
        migrate_per_token=0.7,
    )
    assert through_json(random) == random
