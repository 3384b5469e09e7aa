"""The latency model: looked up in buckets, predicted beyond them, stored."""

import json
from dataclasses import replace

import numpy as np
import pytest
from fakes import SPLITS, made_up_latency
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.engine.sequences.prefill_calls import Spans, prefill_calls
from pat_jax.planning.latency.model import LatencyModel
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
