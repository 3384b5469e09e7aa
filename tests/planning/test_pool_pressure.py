"""Pools that do not hold every sequence: steps and rows against plain sums, and replays of real lengths."""

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
from fakes import SPLITS, made_up_latency, make_load
from hypothesis import given
from hypothesis import strategies as st
from made_up_memory import PAGE, make_memory

from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.sequences.page_allocator import PageAllocator
from pat_jax.planning.lengths.baseline import Baseline
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.memory import MemoryModel
from pat_jax.planning.planner.drafting import PoolPressure
from pat_jax.planning.planner.forecast import Forecast
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.profiling.simulate.machine import Machine, Workload
from pat_jax.profiling.simulate.simulator import replay

DP8, DP4TP2, DP2TP4, TP8 = SPLITS
CAP = 480


def lengths_of(*ended: int) -> LengthModel:
    lengths = np.repeat(ended, 50)
    return LengthModel(Baseline.empty(CAP, 1e-3)).updated(lengths, lengths >= CAP)


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


CONFIG = replace(
    RolloutConfig(),
    max_prompt_length=20,
    max_completion_length=480,
    min_rows=1,
    min_length=64,
    burst_steps=32,
)
CAPACITY = 32


@given(st.sampled_from(SPLITS), st.integers(1, CAPACITY), st.integers(1, 512), st.integers(2, 2000))
def test_a_pool_holds_whole_pages_and_the_null_page(split, rows, tokens, pages):
    memory = make_memory(1e9, pages=pages)
    pool = PageAllocator(memory.pages[split], PAGE)
    room = all(pool.take(-(-tokens // PAGE)) is not None for _ in range(rows))
    assert (memory.needed(np.array(rows), np.array(tokens)) < memory.pages[split]) == room


@given(st.floats(100, 60_000))
def test_where_there_is_room_to_go_and_to_be(limit):
    """Added up move by move, for each pair."""
    memory, pool = make_memory(limit, pages=60), 64 * 60
    has_room, may_switch = memory.has_room(SPLITS), memory.may_switch(SPLITS)
    least = min(memory.weights.values())
    for b, target in enumerate(SPLITS):
        holds = memory.weights[target] + pool <= memory.usable
        assert has_room[b] == (holds or memory.weights[target] == least)
        for a, source in enumerate(SPLITS):
            chunk = memory.chunk // min(source.tp, target.tp)
            held = max(memory.weights[source], memory.weights[target]) + chunk
            goes = held + pool + memory.staging <= memory.usable
            assert may_switch[a, b] == (has_room[b] and goes)


def test_somewhere_it_must_run():
    memory = make_memory(1.0, pages=2)
    assert memory.has_room(SPLITS).tolist() == [False, False, False, True]
    assert not memory.may_switch(SPLITS).any()


def faster_without_tp(per_row: float = 0.0):
    return made_up_latency(
        {DP8: 0.1, DP4TP2: 0.2, DP2TP4: 0.4, TP8: 0.8},
        {split: per_row * split.tp for split in SPLITS},
        reshard=0.5,
        migrate_per_token=1e-4,
        max_rows=CAPACITY,
        lengths=(64, 128, 256, 512),
    )


def planner_of(memory: MemoryModel | None) -> CostModelPlanner:
    return CostModelPlanner(SPLITS, faster_without_tp(), LengthModel.empty(480), memory=memory)


class TestThePlanner:
    def test_it_does_not_start_where_the_weights_do_not_fit(self):
        load = make_load(8, DP8, remaining_tokens=480)
        assert planner_of(None).start(load) == DP8
        assert planner_of(make_memory(1e9)).start(load) == DP8
        assert planner_of(make_memory(3200, page=0)).start(load) == DP8
        assert planner_of(make_memory(500, page=0)).start(load) == DP4TP2

    def test_a_pool_that_is_too_small_is_a_price_and_no_reason_to_lose(self):
        """Eight sequences of 480 tokens in replicas of 33 pages each: in dp8 all of them have room,
        and two in one replica take turns, or wait until one finds pages in another. Every TP is
        slower."""
        planner = planner_of(make_memory(1e9, pages=33))
        for generated in (10, 230, 240, 400):
            load = make_load(2, DP8, generated=generated, remaining_tokens=480 - generated)
            load = replace(load, replica=np.zeros(2, int))
            assert planner.decide(load, DP8).split == DP8

    @pytest.mark.parametrize("pages", [33, 66, 264])
    def test_no_plan_is_believed_to_lose(self, pages: int):
        for current, running in product(SPLITS, (1, 8, 32)):
            load = make_load(running, current, generated=200, remaining_tokens=280)
            for waiting in (0, 20):
                planner = planner_of(make_memory(1e9, pages=pages))
                plan = planner.decide(replace(load, waiting=waiting), current)
                assert plan.predicted_saving_s >= 0

    def test_a_layout_whose_weights_have_no_room_is_no_target(self):
        """It would be the fastest by far."""
        load = make_load(8, TP8, generated=200, remaining_tokens=280)
        planner = planner_of(make_memory(1e9, pages=264))
        assert planner.decide(load, TP8).split == DP8
        planner = planner_of(make_memory(500, page=0))
        assert planner.decide(load, TP8).split == DP4TP2
        planner = planner_of(make_memory(1.0, pages=33))
        assert planner.decide(load, TP8).split == TP8 and planner.start(load) == TP8

    def test_numbers_stay_sane_where_nothing_fits(self):
        load = make_load(8, DP8, generated=112, remaining_tokens=368)
        plan = planner_of(make_memory(1.0, pages=2)).decide(load, DP8)
        assert 0 < plan.predicted_remaining_s < 1000 and abs(plan.predicted_saving_s) < 1000


@dataclass
class Scenario:
    """Eight long responses beside many short ones; TP is slower everywhere."""

    pages: int

    def __post_init__(self):
        self.memory = make_memory(1e9, pages=self.pages)
        self.machine = Machine.of(
            faster_without_tp(),
            SPLITS,
            CONFIG,
            capacity=CAPACITY,
            memory=self.memory,
        )
        responses = np.tile([480, 20, 20, 20], 8)
        self.workload = Workload(np.full(32, 10), responses, 480)

    def replayed(self, memory: MemoryModel | None):
        seen = np.array([20] * 36 + [480] * 12)
        lengths = LengthModel.empty(480).updated(seen, seen == 480)
        planner = CostModelPlanner(SPLITS, self.machine.truth, lengths, memory=memory)
        return replay(self.workload, planner, self.machine)


def test_a_replay_in_small_pools_stays_where_it_is_fastest():
    scenario = Scenario(pages=33)
    done = scenario.replayed(scenario.memory)
    assert done.trace.path == ["dp8tp1"] and done.preempted
