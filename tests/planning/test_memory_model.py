"""Which loads fit: against plain sums of what the engine holds, and what the planner makes of it."""

from dataclasses import dataclass, replace

import numpy as np
from fakes import SPLITS, made_up_latency, make_load
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.config import RolloutConfig
from pat_jax.engine.buckets import Buckets
from pat_jax.planning.forecast import Forecast
from pat_jax.planning.lengths import LengthModel
from pat_jax.planning.memory import USABLE, MemoryModel
from pat_jax.planning.planner import CostModelPlanner
from pat_jax.planning.types import MIGRATE_ALL, RECOMPUTE_ALL
from pat_jax.profiling.hindsight import clairvoyant
from pat_jax.profiling.simulator import Machine, Workload, replay

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


def make_memory(limit: float, *, weights: int = 800, token: int = 4, **changes) -> MemoryModel:
    """Every TP degree halves both; KV heads are replicated beyond TP4."""
    buckets = Buckets.build(SPLITS, capacity=CAPACITY, min_rows=1, min_length=64, max_length=512)
    memory = MemoryModel(
        limit=limit / USABLE,
        resident=0,
        weights={split: weights // split.tp for split in SPLITS},
        token={split: token // min(split.tp, 4) for split in SPLITS},
        rows=buckets.rows,
        lengths=buckets.lengths,
        prefill_rows=2,
        chunk=40,
        ahead=CONFIG.check_every,
    )
    return replace(memory, **changes)


def bucket(steps: tuple[int, ...], needed: int) -> int:
    return min((n for n in steps if n >= needed), default=steps[-1])


@given(
    st.sampled_from(SPLITS), st.integers(1, CAPACITY), st.integers(1, 512), st.integers(0, 10_000)
)
def test_a_cache_and_the_smaller_one_beside_it_are_counted(split, rows, tokens, resident):
    memory = make_memory(1e9, resident=resident)
    row, length = bucket(memory.rows[split], rows), bucket(memory.lengths, tokens)
    smaller = [(r, length) for r in memory.rows[split] if r < row]
    smaller += [(row, n) for n in memory.lengths if n < length]
    most = max((r * n for r, n in smaller), default=0)
    expected = resident + memory.weights[split] + memory.token[split] * (row * length + most)
    assert memory.running(split, np.array(rows), np.array(tokens)) == expected
    more = memory.running(split, np.array(min(rows + 1, CAPACITY)), np.array(tokens))
    assert more >= expected


@given(st.integers(1, CAPACITY), st.sampled_from(SPLITS), st.floats(100, 30_000))
def test_what_fits_a_switch_holds_both_caches(live, current, limit):
    """Added up move by move, for each pair and moment."""
    memory = make_memory(limit)
    load = make_load(live, current, budget=400)
    seen = Forecast.of(load, LengthModel.empty(480), SPLITS, current, 6)
    last = int((load.context + load.budget).max())
    fits = memory.fits(SPLITS, seen, last)
    for j, context in enumerate(seen.context):
        length = bucket(memory.lengths, min(context + memory.ahead, last))
        for a, source in enumerate(SPLITS):
            rows = bucket(memory.rows[source], int(np.ceil(seen.fullest[0, a, j])))
            old = rows * length * memory.token[source]
            for b, target in enumerate(SPLITS):
                new = -(-rows * source.dp // target.dp) * length * memory.token[target]
                chunk = memory.chunk // min(source.tp, target.tp)
                held = max(memory.weights[source], memory.weights[target]) + chunk
                assert fits.migrate[a, b, j] == (held + old + new <= memory.usable)
                assert fits.reslice[a, b, j] == (held + new <= memory.usable)


def test_somewhere_it_must_run():
    load = make_load(32, DP8, budget=400)
    seen = Forecast.of(load, LengthModel.empty(480), SPLITS, DP8, 6)
    fits = make_memory(1.0).fits(SPLITS, seen, 500)
    assert (fits.run.sum(axis=0) == 1).all() and not fits.migrate.any()


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
        assert planner_of(make_memory(3200, token=0)).start(load) == DP8
        assert planner_of(make_memory(500, token=0)).start(load) == DP4TP2

    def test_it_leaves_before_the_cache_outgrows_the_device(self):
        """With all rows in use the KV cache takes the same everywhere; TP gives the weights' half.

        One row a group: 40 bytes for each of 128 + 64 columns at first, 512 + 256 in the end.
        """
        memory = make_memory(80_000 + 40 * 200, token=40, weights=80_000)
        planner = planner_of(memory)
        # 256 + 128 columns are too many; the cache grows when fewer than 8 tokens are left.
        for generated, stays in ((10, True), (110, True), (112, False)):
            load = make_load(8, DP8, generated=generated, budget=480 - generated)
            assert planner_of(None).plan(load, DP8).split == DP8
            plan = planner.plan(load, DP8)
            assert (plan.split == DP8) == stays and "would not hold the KV cache" in plan.reason
            assert (
                plan.predicted_remaining_s > planner_of(None).plan(load, DP8).predicted_remaining_s
            )
        assert plan.split == DP4TP2 and -100 < plan.predicted_saving_s < 0

    def test_it_does_not_prefill_where_its_rows_do_not_fit(self):
        """Decoding a row of 64 columns takes 2560 bytes in DP8, and 64 prefilled rows 164 kB more."""
        load = make_load(8, DP8, budget=40)
        memory = make_memory(150_000, token=40, weights=80_000)
        assert planner_of(memory).start(load) == DP8
        assert planner_of(replace(memory, prefill_rows=64)).start(load) != DP8

    def test_it_migrates_where_the_prefill_does_not_fit(self):
        """Migrating costs more here, and is the only way there is room for."""
        latency = made_up_latency(
            {DP8: 0.8, DP4TP2: 0.1},
            dict.fromkeys((DP8, DP4TP2), 0.0),
            reslice=0.1,
            migrate_per_token=0.1,
            prefill=0.01,
        )
        planner = CostModelPlanner((DP8, DP4TP2), latency, LengthModel.empty(480))
        load = make_load(2, DP8, generated=10, budget=100)
        assert planner.plan(load, DP8).recompute_below == RECOMPUTE_ALL
        planner.memory = make_memory(150_000, token=40, weights=80_000, prefill_rows=128)
        plan = planner.plan(load, DP8)
        assert (plan.split, plan.recompute_below) == (DP4TP2, MIGRATE_ALL)

    def test_numbers_stay_sane_where_nothing_fits(self):
        load = make_load(8, DP8, generated=112, budget=368)
        plan = planner_of(make_memory(1.0, token=40)).plan(load, DP8)
        assert 0 < plan.predicted_remaining_s < 1000 and abs(plan.predicted_saving_s) < 1000

    def test_it_recomputes_where_two_caches_do_not_fit(self):
        """Going up with replicated KV heads takes twice as much beside what is left behind."""
        load = make_load(4, DP2TP4, generated=200, budget=40)
        latency = made_up_latency(
            {DP2TP4: 0.8, TP8: 0.1},
            {DP2TP4: 0.0, TP8: 0.0},
            reslice=0.1,
            migrate_per_token=1e-4,
            lengths=(64, 128, 256, 512),
        )
        planner = CostModelPlanner((DP2TP4, TP8), latency, LengthModel.empty(480))
        assert planner.plan(load, DP2TP4).recompute_below == MIGRATE_ALL
        # Weights of 20 kB and 2 rows of 256 columns and 40 bytes before, 10 kB and 4 rows after:
        # 81 kB while it migrates, 71 kB with the two rows that are prefilled at a time.
        planner.memory = make_memory(75_000, token=160, weights=80_000)
        plan = planner.plan(load, DP2TP4)
        assert (plan.split, plan.recompute_below) == (TP8, RECOMPUTE_ALL)


@dataclass
class Scenario:
    """No tail: every response runs to the cap. TP is slower everywhere, and all that has room."""

    limit: float

    def __post_init__(self):
        self.memory = make_memory(self.limit, token=40, weights=80_000)
        self.machine = Machine.of(
            faster_without_tp(), SPLITS, CONFIG, capacity=CAPACITY, memory=self.memory
        )
        self.workload = Workload(np.full(8, 10), np.full(8, 480), 480)

    def replayed(self, memory: MemoryModel | None):
        lengths = LengthModel.empty(480).updated(np.full(50, 480), np.ones(50, bool))
        planner = CostModelPlanner(SPLITS, self.machine.truth, lengths, memory=memory)
        return replay(self.workload, planner, self.machine)


def test_a_replay_moves_to_the_layout_that_has_room():
    scenario = Scenario(limit=80_000 + 40 * 500)
    blind, seeing = scenario.replayed(None), scenario.replayed(scenario.memory)
    memory = scenario.memory
    assert blind.path == [(0, "dp8tp1")]
    assert not all(memory.holds(b.split, b.rows, b.length) for b in blind.bursts)
    assert all(memory.holds(b.split, b.rows, b.length) for b in seeing.bursts)
    assert seeing.path[0] == (0, "dp8tp1") and len(seeing.path) > 1
    assert seeing.total_s > blind.total_s
    best = clairvoyant(scenario.workload, scenario.machine)
    assert best.total_s <= seeing.total_s * (1 + 1e-9) and best.switches
    everything = replace(scenario.machine, memory=None)
    assert clairvoyant(scenario.workload, everything).switches == ()


def test_room_for_everything_changes_nothing():
    scenario = Scenario(limit=1e9)
    assert scenario.replayed(scenario.memory).path == scenario.replayed(None).path
