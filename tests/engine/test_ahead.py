"""Bursts dispatched before the results of the one before are known: nothing comes out differently."""

from contextlib import closing
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from fakes import made_up_latency, static_run, subject
from two_devices import CONFIG, DP2, TP2, engine, generate, reading_pages

from pat_jax.engine.device.decode.sampling import sequence_key
from pat_jax.engine.device_executor import DeviceExecutor
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.executor import Burst, Collected
from pat_jax.engine.record.report import RolloutReport
from pat_jax.engine.scheduler import Scheduler
from pat_jax.engine.sequences.contents import RowsOutput
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.engine.sequences.sampling import Sampling
from pat_jax.models.policy import Params
from pat_jax.planning.memory import MemoryModel
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.planner.scripts import FixedLayout, ScriptedPath, Step
from pat_jax.planning.types import MIGRATE_ALL, RECOMPUTE_ALL, Plan
from pat_jax.profiling.simulate.machine import Machine, Workload
from pat_jax.profiling.simulate.simulator import replay
from tests.near_ties import check_lossless

pytestmark = pytest.mark.usefixtures("free_pages")


@pytest.fixture
def ahead(monkeypatch) -> list[str]:
    """What the host did in which order: bursts dispatched, results taken in."""
    done, burst_behind, launch = [], Scheduler.burst_behind, DeviceExecutor.launch
    collect = Scheduler.collect

    def noted_burst(self: Scheduler, in_flight: Burst, plan: Plan) -> Burst | None:
        burst = burst_behind(self, in_flight, plan)
        if burst is None:
            done.append("no launch")
        return burst

    def noted_launch(self: DeviceExecutor, burst: Burst) -> None:
        launch(self, burst)
        if burst.is_ahead:
            done.append("launch")

    def noted_collect(self: Scheduler, output: RowsOutput) -> Collected:
        collected = collect(self, output)
        done.append("collect" if collected.steps else "collect nothing")
        return collected

    monkeypatch.setattr(Scheduler, "burst_behind", noted_burst)
    monkeypatch.setattr(DeviceExecutor, "launch", noted_launch)
    monkeypatch.setattr(Scheduler, "collect", noted_collect)
    return done


@cache
def scarce_pages() -> RolloutEngine:
    return reading_pages(kv_pages=26)


# The second compiles an engine of its own.
on_both = pytest.mark.parametrize(
    "make",
    [engine, pytest.param(scarce_pages, marks=pytest.mark.slow)],
    ids=["copied", "on pages"],
)


def damaged(token: int) -> Params:
    """Weights with NaN in a token's embedding."""
    params = jax.tree.map(np.array, subject("kv2").params)
    params["embedding"][token] = np.nan
    return params


def check(requests: list[Request], expected: list[Completion], found: list[Completion]) -> None:
    check_lossless(subject("kv2").compared(requests, expected, found))


def checked(one: RolloutEngine, requests: list[Request], ahead: list[str]) -> RolloutReport:
    expected, _ = subject("kv2").run(requests, subject("kv2").static(1))
    ahead.clear()
    found, report = generate(one, requests, FixedLayout(DP2))
    check(requests, expected, found)
    return report


@pytest.mark.parametrize("below", [MIGRATE_ALL, RECOMPUTE_ALL], ids=["migrate", "recompute"])
def test_no_token_changes(ahead, below):
    """Rows compacted, contexts lengthened and layouts switched with a burst on its way."""
    requests, expected = static_run("kv2", seed=0)
    for planner in (
        FixedLayout(DP2),
        ScriptedPath(DP2, (Step(TP2, 12, below), Step(DP2, 8, below), Step(TP2, 3, below))),
    ):
        found, report = generate(engine(), requests, planner)
        check(requests, expected, found)
        assert report.tokens == sum(len(done.tokens) for done in found)
        assert report.decode_steps == report.done_after[-1] + -report.done_after[-1] % 4
    # Up and down; what a plan says while a burst is on its way comes one burst later, or never.
    assert len(report.switches) >= 2
    assert ahead.count("launch") > 5 and ahead.count("collect nothing") > 0
    assert len({burst.length for burst in report.bursts}) > 1


@pytest.mark.slow  # compiles an engine of its own
def test_no_token_changes_where_rows_and_pages_are_scarce(ahead):
    requests, expected = static_run("kv2", seed=0)
    small = engine(kv_pages=10, capacity=4)
    found, report = generate(small, requests, FixedLayout(DP2))
    check(requests, expected, found)
    assert report.preempted > 0
    assert {"launch", "no launch"} <= set(ahead)
    # Two long responses in each replica, and pages for one of them and a part of the other: nobody
    # waits.
    requests = [Request((3, 4, 5 + i), sequence_key(12, i), 50, ignore_eos=True) for i in range(4)]
    report = checked(small, requests, ahead)
    assert report.preempted > 0 and "launch" in ahead


def test_each_burst_is_dispatched_before_the_results_of_the_one_before_are_taken_in(ahead):
    request = Request((3, 4, 5), sequence_key(1), max_new_tokens=29, ignore_eos=True)
    generate(engine(), [request, replace(request, key=sequence_key(2))], FixedLayout(DP2))
    # Four bursts of eight steps; the fourth is known to be the last.
    assert ahead == [*["launch", "collect"] * 3, "no launch", "collect"]


@on_both
def test_who_has_said_enough_is_not_heard_any_more(make, ahead):
    """It ends although a burst with it is on its way, and nobody else notices."""
    requests, expected = static_run("kv2", seed=0)
    ended = {i for i in range(len(requests)) if i % 3 == 0}
    found, _ = generate(
        make(),
        requests,
        FixedLayout(DP2),
        should_stop=lambda i, tokens: i in ended and len(tokens) >= 5,
    )
    kept = [i for i in range(len(requests)) if i not in ended]
    check([requests[i] for i in kept], [expected[i] for i in kept], [found[i] for i in kept])
    for i in ended:
        generated, whole = found[i].tokens.tolist(), expected[i].tokens.tolist()
        assert generated == whole[: len(generated)]
        assert min(5, len(whole)) <= len(generated) <= 5 + CONFIG.burst_steps
    assert "launch" in ahead and "no launch" in ahead


@on_both
def test_logits_that_are_no_numbers_end_their_row_alone(make, ahead):
    """What the failed row goes on writing while the next burst is on its way reaches nobody."""
    sampling = Sampling(stop_token_ids=(60,))
    sound = [
        Request((3, 4, 5 + i), sequence_key(7, i), 29, ignore_eos=True, sampling=sampling)
        for i in range(6)
    ]
    expected, _ = generate(make(), sound, FixedLayout(DP2))
    bad = [replace(request, tokens=(3, 60, *request.tokens)) for request in sound[:2]]
    found, _ = generate(make(), [*bad, *sound], FixedLayout(DP2), damaged(60))
    assert all("token 1 of the response" in done.error for done in found[:2])
    assert [done.error for done in found[2:]] == [""] * 6
    check(sound, expected, found[2:])
    assert ahead.count("launch") > 2


def test_a_rollout_that_nobody_takes_is_dropped_with_a_burst_on_its_way(ahead, monkeypatch):
    requests, _ = static_run("kv2", seed=0)
    layout, freed = engine().layouts[DP2], []
    release = DeviceExecutor.release

    def noted(self: DeviceExecutor) -> None:
        release(self)
        freed.append(all(leaf.is_deleted() for leaf in jax.tree.leaves(self.pool.pages)))

    monkeypatch.setattr(DeviceExecutor, "release", noted)
    weights = jax.device_put(subject("kv2").params, layout.param_shardings(engine().policy))
    engine().set_weights(weights, layout)
    with closing(engine().stream(requests, FixedLayout(DP2), RolloutReport())) as stream:
        next(stream)
        assert ahead[-2:] == ["launch", "collect"]
    engine().release_weights()
    assert freed == [True]


@pytest.mark.slow  # compiles an engine of its own
def test_pages_of_the_ended_serve_others_while_a_burst_still_writes_to_them(ahead):
    """Half of the sequences end in the first burst, and the others take over their pages."""
    rng = np.random.default_rng(4)
    requests = [
        Request(tuple(rng.integers(3, 61, 7).tolist()), sequence_key(6, i), most, ignore_eos=True)
        for i, most in enumerate([5, 5, 41, 41] * 4)
    ]
    small = scarce_pages()
    assert sum((7 + r.max_new_tokens) // 8 for r in requests) > 2 * small.specs.pages[DP2]
    report = checked(small, requests, ahead)
    assert report.preempted == 0 and ahead.count("launch") > 2
    # A quarter ends early, too few for smaller rows: bursts follow one another, and the others draw pages of the ended.
    requests = [
        Request((3, 4, 5 + i), sequence_key(13, i), 7 if i < 4 else 30, ignore_eos=True)
        for i in range(16)
    ]
    report = checked(small, requests, ahead)
    assert ahead[:6] == ["launch", "collect"] * 3 and report.preempted == 0


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
        memory if has_pools else None,
        runs_ahead=engine.runs_ahead,
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
