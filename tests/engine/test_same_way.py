"""The engine and the simulator go the same way, burst for burst: every rule is written once."""

from dataclasses import replace

import numpy as np
import pytest
from fakes import made_up_latency
from two_devices import DP2, TP2, engine, generate

from pat_jax.engine.device.decode.sampling import sequence_key
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.record.report import RolloutReport
from pat_jax.engine.sequences.responses import Request
from pat_jax.planning.memory import MemoryModel
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.planner.scripts import FixedLayout, ScriptedPath, Step
from pat_jax.profiling.simulate.machine import Machine, Workload
from pat_jax.profiling.simulate.simulator import replay

pytestmark = pytest.mark.usefixtures("free_pages")


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("runs_ahead", [False, True], ids=["in turn", "ahead"])
def test_the_simulator_goes_the_same_way(runs_ahead, seed, monkeypatch):
    """Burst for burst: layouts, buckets, running sequences and steps."""
    monkeypatch.setattr(engine(), "runs_ahead", runs_ahead)
    planner = ScriptedPath(DP2, (Step(TP2, 7), Step(DP2, 4), Step(TP2, 2)))
    check_simulator(engine(), planner, seed, has_pools=False)


@pytest.mark.slow  # compiles an engine of its own
@pytest.mark.parametrize("runs_ahead", [False, True], ids=["in turn", "ahead"])
@pytest.mark.parametrize("seed", [0, 2, 4, 5])
def test_the_simulator_goes_the_same_way_where_rows_and_pages_are_scarce(
    seed, runs_ahead, monkeypatch
):
    """Who waits, and bursts that end because pages run out, or for those that wait."""
    small = engine(kv_pages=10, capacity=4)
    monkeypatch.setattr(small, "runs_ahead", runs_ahead)
    report = check_simulator(small, FixedLayout(DP2), seed, has_pools=True)
    assert report.preempted > 0 and 4 in np.diff(report.trace.steps), "half a burst"
    path = ScriptedPath(DP2, (Step(TP2, 7), Step(DP2, 4)))
    assert check_simulator(small, path, seed, has_pools=True).switches


def check_simulator(
    engine: RolloutEngine, planner: Planner, seed: int, *, has_pools: bool
) -> RolloutReport:
    rng = np.random.default_rng(seed)
    prompts = rng.integers(1, 12, 16)
    requests = [
        Request(tuple(rng.integers(3, 61, n).tolist()), sequence_key(seed, i), max_new_tokens=40)
        for i, n in enumerate(prompts.tolist())
    ]
    found, report = generate(engine, requests, planner)
    responses = np.array([len(done.tokens) for done in found])
    specs, splits = engine.specs, tuple(engine.layouts)
    truth = made_up_latency(
        dict.fromkeys(splits, 1.0),
        dict.fromkeys(splits, 0.0),
        reshard=0.0,
        migrate_per_token=0.0,
        max_rows=16,
        lengths=specs.buckets.lengths,
    )
    truth = replace(truth, page_size=specs.page_size)
    memory = MemoryModel(
        limit=1e9,
        resident=0,
        weights=dict.fromkeys(splits, 1),
        page=dict.fromkeys(splits, 1),
        pages=specs.pages,
        page_size=specs.page_size,
        chunk=1,
        staging=1,
        ahead=4,
    )
    machine = Machine(
        truth,
        splits,
        specs.buckets,
        specs.functions.burst_steps,
        specs.functions.check_every,
        memory,
        runs_ahead=engine.runs_ahead,
        has_pools=has_pools,
    )
    simulated = replay(Workload(prompts, responses, 40), planner, machine)
    assert [(b.split, b.rows) for b in simulated.bursts] == [
        (b.split, b.rows) for b in report.bursts
    ]
    assert [b.held for b in simulated.bursts] == [b.held for b in report.bursts]
    assert simulated.trace.running == report.trace.running
    assert simulated.trace.steps == report.trace.steps
    assert [s.step for s in simulated.trace.switches] == [s.step for s in report.switches]
    assert simulated.preempted == report.preempted
    return report
