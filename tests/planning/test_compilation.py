"""Layouts that are not compiled: never planned, and wanted where compiling them would pay."""

import numpy as np
import pytest
from fakes import SPLITS, made_up_latency, make_load
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.compilation import (
    RECENT,
    CompileTimes,
    Uncompiled,
    follow,
    optimistic,
)
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.planning.types import Split

DP8, DP4TP2, DP2TP4, TP8 = SPLITS
CAP = 400
LONG_TAIL = LengthModel.empty(CAP, prior_weight=1e-3).updated(
    np.array([50] * 95 + [CAP] * 5), np.zeros(100, bool)
)
FASTER_WITH_TP = {DP8: 0.8, DP4TP2: 0.5, DP2TP4: 0.3, TP8: 0.2}


def machine(step: dict[Split, float], per_row: float = 0.01, reslice: float = 0.5):
    rows = {split: per_row * split.tp for split in step}
    return made_up_latency(
        step, rows, reslice=reslice, migrate_per_token=5e-4, max_rows=128, lengths=(64, 512)
    )


def make_planner(latency, uncompiled=None, splits=SPLITS, **options) -> CostModelPlanner:
    return CostModelPlanner(splits, latency, LONG_TAIL, uncompiled=uncompiled, **options)


class TestThePlan:
    @settings(max_examples=25)
    @given(st.sets(st.sampled_from(SPLITS[1:])), st.integers(1, 90), st.integers(0, 390), st.data())
    def test_it_is_that_of_the_compiled_layouts(self, closed, live, generated, data):
        steps = {split: data.draw(st.floats(0.05, 1.0)) for split in SPLITS}
        latency, ready = machine(steps), tuple(s for s in SPLITS if s not in closed)
        current = data.draw(st.sampled_from(ready))
        uncompiled = Uncompiled(dict.fromkeys(closed, 5.0), 100)
        planner = make_planner(latency, uncompiled)
        alone = make_planner(latency, splits=ready)
        load = make_load(live, current, generated=generated, budget=CAP - generated)
        plan, expected = planner.decide(load, current), alone.decide(load, current)
        assert (plan.split, plan.threshold, plan.recompute_below) == (
            expected.split,
            expected.threshold,
            expected.recompute_below,
        )
        assert plan.predicted_remaining_s == pytest.approx(expected.predicted_remaining_s)
        full = make_load(96, DP8, budget=CAP)
        assert planner.start(full) == alone.start(full)
        assert uncompiled.wanted <= closed

    @pytest.mark.parametrize("at_start", [False, True])
    def test_a_layout_is_wanted_where_the_iterations_left_pay_for_it(self, at_start):
        latency, load = machine(FASTER_WITH_TP), make_load(2, DP8, generated=60, budget=340)
        if at_start:
            load = make_load(96, DP8, budget=CAP)

        def seconds(splits) -> float:
            planner = make_planner(latency, splits=splits, min_saving=0.0)
            return planner.decide(load, DP8).predicted_remaining_s

        gain = seconds((DP8,)) - seconds((DP8, TP8))
        assert gain > 10
        for cost, is_wanted in ((50 * gain, True), (200 * gain, False)):
            uncompiled = Uncompiled({TP8: cost}, iterations_left=100)
            planner = make_planner(latency, uncompiled, (DP8, TP8), min_saving=0.0)
            planner.start(load) if at_start else planner.decide(load, DP8)
            assert uncompiled.wanted == ({TP8} if is_wanted else set())

    def test_a_gain_within_the_noise_is_no_reason(self):
        load = make_load(2, DP8, budget=CAP)
        for min_saving, is_wanted in ((0.02, False), (0.0, True)):
            latency = machine({**dict.fromkeys(SPLITS, 0.8), TP8: 0.79}, per_row=0.0, reslice=0.0)
            uncompiled = Uncompiled({TP8: 0.0}, 9)
            make_planner(latency, uncompiled, min_saving=min_saving).decide(load, DP8)
            assert (TP8 in uncompiled.wanted) == is_wanted


class TestSpreading:
    def test_over_the_iterations_left(self):
        uncompiled = Uncompiled({TP8: 30.0}, 10)
        assert uncompiled.spread_s(TP8) == 3.0 and uncompiled.spread_s(DP8) == 0.0
        uncompiled.iterations_left = 0
        assert uncompiled.spread_s(TP8) > 1e4

    def test_over_those_of_them_that_need_it(self):
        """A rollout too short for a tail counts against a layout, one with a tail for it."""
        latency = machine(FASTER_WITH_TP, reslice=5.0)
        tail = make_load(2, DP8, generated=60, budget=340)
        uncompiled = Uncompiled({TP8: 1e9}, 100)
        planner = make_planner(latency, uncompiled, (DP8, TP8))
        planner.decide(make_load(1, DP8, generated=399, budget=1), DP8)
        uncompiled.end_rollout(100)
        assert uncompiled.spread_s(TP8) == pytest.approx(1e7 / RECENT)
        for _ in range(30):
            planner.decide(tail, DP8)
            uncompiled.end_rollout(100)
        assert uncompiled.spread_s(TP8) == pytest.approx(1e7, rel=0.01)
        assert not uncompiled.wanted

    def test_what_is_compiled_is_neither_priced_nor_wanted(self):
        latency = machine(FASTER_WITH_TP, per_row=0.0)
        uncompiled = Uncompiled({TP8: 1.0, DP2TP4: 1.0}, 100)
        planner = make_planner(latency, uncompiled)
        load = make_load(2, DP8, generated=60, budget=340)
        assert planner.decide(load, DP8).split == DP4TP2 and TP8 in uncompiled.wanted
        uncompiled.compiled(TP8)
        assert planner.decide(load, DP8).split == TP8
        assert TP8 not in uncompiled.wanted and uncompiled.spread_s(TP8) == 0.0


def test_following_choices():
    choices = np.array([[0, 2, 1], [0, 1, 1], [2, 1, 0]])
    assert follow(choices, 1).tolist() == [2, 1, 1]
    assert follow(choices, 0).tolist() == [0, 0, 2]


PROFILE = {"decode dp8tp1": 4.0, "decode dp1tp8": 6.0, "prefill dp1tp8": 2.0}


class TestCompileTimes:
    def test_the_profile_alone(self):
        times = CompileTimes(PROFILE, {})
        assert times.estimate({("decode", TP8): 3, ("prefill", TP8): 1}) == 3 * 6.0 + 2.0
        assert times.one("resize", TP8) == 2.0  # no slower than the quickest that runs the model

    def test_this_run_corrects_the_profile(self):
        """A cache of compiled programs, say: all take a tenth of the time."""
        times = CompileTimes(PROFILE, {("decode", DP8): [0.3, 0.5], ("resize", DP8): [0.2]})
        assert times.one("decode", TP8) == pytest.approx(0.6)
        assert times.one("prefill", TP8) == pytest.approx(0.2)
        assert times.one("resize", TP8) == pytest.approx(0.2)
        assert times.one("reslice", TP8) == pytest.approx(0.2)

    def test_without_a_profile_programs_take_what_their_like_took(self):
        times = CompileTimes({}, {("decode", DP8): [1.0, 3.0], ("resize", DP8): [0.5]})
        assert times.one("decode", TP8) == 2.0
        assert times.one("reslice", TP8) == pytest.approx(1.5)
        assert CompileTimes({}, {}).one("decode", TP8) == 0.0


ROWS = {split: tuple(range(1, 1 + 8 // split.dp)) for split in SPLITS}


class TestOptimism:
    def test_what_was_measured_is_kept_and_the_rest_is_as_good_as_it_can_be(self):
        whole = machine(FASTER_WITH_TP)
        known = machine({split: FASTER_WITH_TP[split] for split in (DP8, DP4TP2)})
        filled = optimistic(known, ROWS, (64, 512))
        for name in ("decode_table", "prefill_table", "reslice_table", "migrate_table"):
            table, before = getattr(filled, name), getattr(known, name)
            assert {key: table[key] for key in before} == before and len(table) > len(before)
        for rows in ROWS[TP8]:
            best = known.decode_step(DP4TP2, rows, 512) / 4
            assert filled.decode_step(TP8, rows, 512) == pytest.approx(best)
        for pair in whole.reslice_table:
            assert filled.reslice(*pair) == (0.5 if pair in known.reslice_table else 0.0)

    def test_a_narrower_layout_is_taken_to_be_as_fast_as_a_wider_one(self):
        filled = optimistic(machine({TP8: 0.2}), ROWS, (64,))
        assert filled.decode_step(DP8, 1, 64) == filled.decode_step(TP8, 1, 64)

    def test_where_everything_is_measured_nothing_changes(self):
        latency = machine(FASTER_WITH_TP)
        assert optimistic(latency, ROWS, (64, 512)) == latency

    def test_it_is_tried_only_if_even_that_would_pay(self):
        known = machine({DP8: 0.8}, per_row=0.0)
        load = make_load(2, DP8, generated=60, budget=340)
        for compile_s, is_wanted in ((1.0, True), (1e6, False)):
            latency = optimistic(known, ROWS, (64, 512))
            uncompiled = Uncompiled(dict.fromkeys(SPLITS[1:], compile_s), 100)
            planner = make_planner(latency, uncompiled)
            assert planner.decide(load, DP8).split == DP8
            assert bool(uncompiled.wanted) == is_wanted
