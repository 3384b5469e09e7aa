"""Which loads fit: against plain sums of what the engine holds, and what the planner makes of it."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from fakes import SPLITS, made_up_latency, make_load
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.config import RolloutConfig
from pat_jax.engine.paging import PagePool
from pat_jax.planning.forecast import Forecast
from pat_jax.planning.lengths import LengthModel
from pat_jax.planning.memory import USABLE, MemoryModel
from pat_jax.planning.planner import CostModelPlanner
from pat_jax.planning.types import MIGRATE_ALL
from pat_jax.profiling.hindsight import clairvoyant
from pat_jax.profiling.machine import Burst, Machine, Workload
from pat_jax.profiling.simulator import replay

DP8, DP4TP2, DP2TP4, TP8 = SPLITS
CONFIG = replace(
    RolloutConfig(),
    max_prompt_length=20,
    max_completion_length=480,
    min_rows=1,
    min_length=64,
    burst_steps=32,
)
CAPACITY = 32


PAGE = 16  # tokens


def make_memory(
    limit: float, *, weights: int = 800, page: int = 64, pages: int = 264, **changes
) -> MemoryModel:
    """Every TP degree halves the weights and a page, and doubles the pages; KV heads are replicated
    beyond TP4. 33 pages hold a row of 512 tokens.
    """
    memory = MemoryModel(
        limit=limit / USABLE,
        resident=0,
        weights={split: weights // split.tp for split in SPLITS},
        page={split: page // min(split.tp, 4) for split in SPLITS},
        pages={split: pages * min(split.tp, 4) for split in SPLITS},
        page_size=PAGE,
        chunk=40,
        staging=7,
        ahead=CONFIG.check_every,
    )
    return replace(memory, **changes)


@given(st.sampled_from(SPLITS), st.integers(1, CAPACITY), st.integers(1, 512), st.integers(2, 2000))
def test_a_pool_holds_whole_pages_and_the_null_page(split, rows, tokens, pages):
    memory = make_memory(1e9, pages=pages)
    pool = PagePool(memory.pages[split], PAGE)
    room = all(pool.extend(np.zeros(0, np.int32), tokens) is not None for _ in range(rows))
    assert memory.holds(split, np.array(rows), np.array(tokens)) == room


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_pool_takes_the_same_of_a_device_in_every_layout_that_splits_the_heads(split):
    memory = make_memory(1e9, resident=1000)
    assert memory.pool(split) == 64 * 264
    assert memory.held(split) == 1000 + 800 // split.tp + 64 * 264


@given(st.integers(1, CAPACITY), st.sampled_from(SPLITS), st.floats(100, 60_000))
def test_what_fits_a_switch_holds_the_weights_and_has_pages_in_one_pool(live, current, limit):
    """Added up move by move, for each pair and moment."""
    memory = make_memory(limit, pages=60)
    load = make_load(live, current, budget=400)
    seen = Forecast.of(load, LengthModel.empty(480), SPLITS, current, 6)
    last = int((load.context + load.budget).max())
    fits = memory.fits(SPLITS, seen, last)
    for j, context in enumerate(seen.context):
        tokens = min(context + memory.ahead, last)
        need = [int(np.ceil(seen.fullest[0, b, j])) * -(-tokens // PAGE) for b in range(4)]
        for b, target in enumerate(SPLITS):
            pages, pool = memory.pages[target], 64 * 60
            arrives = memory.weights[target] + pool <= memory.usable and need[b] <= pages - 1
            assert fits.carry[b, j] == arrives
            for a, source in enumerate(SPLITS):
                chunk = memory.chunk // min(source.tp, target.tp)
                held = max(memory.weights[source], memory.weights[target]) + chunk
                reslices = held + pool + memory.staging <= memory.usable
                assert fits.reslice[a, b] == reslices


def test_somewhere_it_must_run():
    load = make_load(32, DP8, budget=400)
    seen = Forecast.of(load, LengthModel.empty(480), SPLITS, DP8, 6)
    fits = make_memory(1.0, pages=2).fits(SPLITS, seen, 500)
    assert (fits.run.sum(axis=0) == 1).all() and not fits.carry.any()


def faster_without_tp(per_row: float = 0.0):
    return made_up_latency(
        {DP8: 0.1, DP4TP2: 0.2, DP2TP4: 0.4, TP8: 0.8},
        {split: per_row * split.tp for split in SPLITS},
        reslice=0.5,
        migrate_per_token=1e-4,
        max_rows=CAPACITY,
        lengths=(64, 128, 256, 512),
    )


def planner_of(memory: MemoryModel | None) -> CostModelPlanner:
    return CostModelPlanner(SPLITS, faster_without_tp(), LengthModel.empty(480), memory=memory)


class TestThePlanner:
    def test_it_does_not_start_where_the_weights_do_not_fit(self):
        load = make_load(8, DP8, budget=480)
        assert planner_of(None).start(load) == DP8
        assert planner_of(make_memory(1e9)).start(load) == DP8
        assert planner_of(make_memory(3200, page=0)).start(load) == DP8
        assert planner_of(make_memory(500, page=0)).start(load) == DP4TP2

    def test_it_leaves_before_a_group_outgrows_its_pool(self):
        """Two sequences of one group, in 33 pages: it holds 256 tokens of each, and no more."""
        planner = planner_of(make_memory(1e9, pages=33))
        for generated, stays in ((10, True), (230, True), (240, False)):
            load = make_load(2, DP8, generated=generated, budget=480 - generated)
            load = replace(load, group=np.zeros(2, int))
            assert planner_of(None).plan(load, DP8).split == DP8
            plan = planner.plan(load, DP8)
            assert (plan.split == DP8) == stays and "would not hold the KV cache" in plan.reason
            assert (
                plan.predicted_remaining_s > planner_of(None).plan(load, DP8).predicted_remaining_s
            )
        assert plan.split == DP4TP2 and -100 < plan.predicted_saving_s < 0

    def test_it_does_not_start_where_the_prompts_have_no_pages(self):
        """Nine sequences of two pages: two in a group of three pages, or three in one of six."""
        load = make_load(9, DP8, prompt=20, budget=8)
        assert planner_of(make_memory(1e9, pages=5)).start(load) == DP8
        assert planner_of(make_memory(1e9, pages=4)).start(load) == DP4TP2

    def test_numbers_stay_sane_where_nothing_fits(self):
        load = make_load(8, DP8, generated=112, budget=368)
        plan = planner_of(make_memory(1.0, pages=2)).plan(load, DP8)
        assert 0 < plan.predicted_remaining_s < 1000 and abs(plan.predicted_saving_s) < 1000

    def test_it_migrates_out_of_a_full_pool_and_not_to_one_that_is_too_small(self):
        """Four sequences of 13 pages in TP8: 52 of 64, of which 27 are taken before in each half."""
        load = make_load(4, DP2TP4, generated=190, budget=40)
        latency = made_up_latency(
            {DP2TP4: 0.8, TP8: 0.1},
            {DP2TP4: 0.0, TP8: 0.0},
            reslice=0.1,
            migrate_per_token=1e-4,
            lengths=(64, 128, 256, 512),
        )
        planner = CostModelPlanner((DP2TP4, TP8), latency, LengthModel.empty(480))
        planner.memory = make_memory(1e9, pages=16)
        plan = planner.plan(load, DP2TP4)
        assert (plan.split, plan.recompute_below) == (TP8, MIGRATE_ALL)
        planner.memory = make_memory(1e9, pages=13)
        assert planner.plan(load, DP2TP4).split == DP2TP4


@dataclass
class Scenario:
    """Two long responses in one group, whose pool holds the first 256 tokens of both. TP is slower
    everywhere, but two groups have twice as many pages together.
    """

    pages: int

    def __post_init__(self):
        self.memory = make_memory(1e9, pages=self.pages)
        self.machine = Machine.of(
            faster_without_tp(), SPLITS, CONFIG, capacity=CAPACITY, memory=self.memory
        )
        self.workload = Workload(np.full(16, 10), np.array([480, 480, *[20] * 14]), 480)

    def replayed(self, memory: MemoryModel | None):
        seen = np.array([20] * 44 + [480] * 6)
        lengths = LengthModel.empty(480).updated(seen, seen == 480)
        planner = CostModelPlanner(SPLITS, self.machine.truth, lengths, memory=memory)
        return replay(self.workload, planner, self.machine)


def test_a_replay_moves_to_the_layout_that_has_room():
    scenario = Scenario(pages=33)
    blind, seeing = scenario.replayed(None), scenario.replayed(scenario.memory)
    memory = scenario.memory
    assert blind.path == [(0, "dp8tp1")]

    def has_room(burst: Burst) -> bool:
        return bool(memory.holds(burst.split, np.array(burst.rows), np.array(burst.length)))

    assert not all(map(has_room, blind.bursts)) and all(map(has_room, seeing.bursts))
    assert seeing.path[0] == (0, "dp8tp1") and len(seeing.path) > 1
    assert seeing.total_s > blind.total_s
    best = clairvoyant(scenario.workload, scenario.machine)
    assert best.total_s <= seeing.total_s * (1 + 1e-9) and best.switches
    everything = replace(scenario.machine, memory=None)
    assert clairvoyant(scenario.workload, everything).switches == ()


def test_room_for_everything_changes_nothing():
    scenario = Scenario(pages=1000)
    assert scenario.replayed(scenario.memory).path == scenario.replayed(None).path
