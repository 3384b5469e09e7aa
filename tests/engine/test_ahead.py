"""Bursts dispatched before the results of the one before are known: nothing comes out differently."""

from contextlib import closing
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from fakes import SETTINGS, made_up_latency, static_run, subject

from benchmarks.lossless import EOS_IDS
from benchmarks.near_ties import Tally, compare
from pat_jax.engine.decode import DecodeFunctions
from pat_jax.engine.flight import Flight
from pat_jax.engine.report import RolloutReport
from pat_jax.engine.rollout import RolloutEngine
from pat_jax.engine.sampling import sequence_key
from pat_jax.engine.scheduler import Completion, Request
from pat_jax.engine.state import Burst
from pat_jax.engine.types import Sampling
from pat_jax.models.policy import Params
from pat_jax.planning.memory import MemoryModel
from pat_jax.planning.planner import Planner
from pat_jax.planning.scripts import FixedLayout, ScriptedPath, Step
from pat_jax.planning.types import MIGRATE_ALL, RECOMPUTE_ALL, Split
from pat_jax.profiling.machine import Machine, Workload
from pat_jax.profiling.simulator import replay

DP2, TP2 = Split(2, 1), Split(1, 2)
CONFIG = replace(SETTINGS["kv2"].rollout, min_rows=1, min_length=32, burst_steps=8, check_every=4)


@cache
def engine(kv_pages: int = 0, capacity: int = 16) -> RolloutEngine:
    engine = RolloutEngine(
        subject("kv2").policy,
        jax.devices()[:2],
        replace(CONFIG, kv_pages=kv_pages),
        capacity=capacity,
        eos_ids=EOS_IDS,
        runs_ahead=True,
    )
    engine.compile()
    return engine


@pytest.fixture
def ahead(monkeypatch) -> list[str]:
    """What the host did in which order: bursts dispatched, results taken in."""
    done, launch_next, collect = [], Flight.launch_next, Flight.collect

    def noted_launch(self, params, running: Burst, threshold: int) -> Burst | None:
        burst = launch_next(self, params, running, threshold)
        done.append("no launch" if burst is None else "launch")
        return burst

    def noted_collect(self, burst: Burst) -> tuple[int, int]:
        steps, tokens = collect(self, burst)
        done.append("collect" if steps else "collect nothing")
        return steps, tokens

    monkeypatch.setattr(Flight, "launch_next", noted_launch)
    monkeypatch.setattr(Flight, "collect", noted_collect)
    return done


@cache
def reading_pages() -> RolloutEngine:
    """As on a GPU or TPU: decodes from the pages where they lie, and a row that has ended goes on
    writing to them until the burst on its way is over. Pages are scarce."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeFunctions, "_begin", lambda self, layout, pool, *_: pool)
        return engine.__wrapped__(kv_pages=26)


def generate(
    engine: RolloutEngine,
    requests: list[Request],
    planner: Planner,
    params: Params | None = None,
    **options,
) -> tuple[list[Completion], RolloutReport]:
    layout = engine.layouts[DP2]
    weights = subject("kv2").params if params is None else params
    engine.set_weights(jax.device_put(weights, layout.param_shardings(engine.policy)), layout)
    report = RolloutReport()
    done = dict(engine.stream(requests, planner, report, **options))
    engine.release_weights()
    return [done[i] for i in range(len(requests))], report


def check(requests: list[Request], expected: list[Completion], found: list[Completion]) -> None:
    decisions = subject("kv2").judge.decisions(requests, expected)
    total = sum(map(compare, expected, found, decisions), Tally())
    assert total.unexplained == total.judge_disagrees == 0
    assert total.compared > 0.9 * total.tokens > 100


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
    assert len({length for _, _, length, _ in report.bursts}) > 1


@pytest.mark.slow  # compiles an engine of its own
def test_no_token_changes_where_rows_and_pages_are_scarce(ahead):
    requests, expected = static_run("kv2", seed=0)
    small = engine(kv_pages=10, capacity=4)
    found, report = generate(small, requests, FixedLayout(DP2))
    check(requests, expected, found)
    assert report.preempted > 0
    assert {"launch", "no launch"} <= set(ahead)


def test_each_burst_is_dispatched_before_the_results_of_the_one_before_are_taken_in(ahead):
    request = Request((3, 4, 5), sequence_key(1), max_new_tokens=29, ignore_eos=True)
    generate(engine(), [request, replace(request, key=sequence_key(2))], FixedLayout(DP2))
    # Four bursts of eight steps; the fourth is known to be the last.
    assert ahead == [*["launch", "collect"] * 3, "no launch", "collect"]


def test_who_has_said_enough_is_not_heard_any_more(ahead):
    """It ends although a burst with it is on its way, and nobody else notices."""
    requests, expected = static_run("kv2", seed=0)
    ended = {i for i in range(len(requests)) if i % 3 == 0}
    found, _ = generate(
        engine(),
        requests,
        FixedLayout(DP2),
        has_enough=lambda i, tokens: i in ended and len(tokens) >= 5,
    )
    kept = [i for i in range(len(requests)) if i not in ended]
    check([requests[i] for i in kept], [expected[i] for i in kept], [found[i] for i in kept])
    for i in ended:
        said, whole = found[i].tokens.tolist(), expected[i].tokens.tolist()
        assert said == whole[: len(said)]
        assert min(5, len(whole)) <= len(said) <= 5 + CONFIG.burst_steps
    assert "launch" in ahead and "no launch" in ahead


def test_logits_that_are_no_numbers_end_their_row_alone(ahead):
    """What the failed row goes on writing while the next burst is on its way reaches nobody."""

    def damage(path: tuple, x: np.ndarray) -> np.ndarray:
        is_embedding = "embedding" in jax.tree_util.keystr(path)
        return np.where((np.arange(len(x)) == 60)[:, None], np.nan, x) if is_embedding else x

    damaged = jax.tree_util.tree_map_with_path(damage, subject("kv2").params)
    sampling = Sampling(stop_token_ids=(60,))
    sound = [
        Request((3, 4, 5 + i), sequence_key(7, i), 29, ignore_eos=True, sampling=sampling)
        for i in range(6)
    ]
    expected, _ = generate(engine(), sound, FixedLayout(DP2))
    bad = [replace(request, tokens=(3, 60, *request.tokens)) for request in sound[:2]]
    found, _ = generate(engine(), [*bad, *sound], FixedLayout(DP2), damaged)
    assert all("token 1 of the response" in done.error for done in found[:2])
    assert [done.error for done in found[2:]] == [""] * 6
    check(sound, expected, found[2:])
    assert ahead.count("launch") > 2


def test_a_rollout_that_nobody_takes_is_dropped_with_a_burst_on_its_way(ahead, monkeypatch):
    requests, _ = static_run("kv2", seed=0)
    layout, freed = engine().layouts[DP2], []
    release = Flight.release

    def noted(self: Flight) -> None:
        release(self)
        freed.append(all(leaf.is_deleted() for leaf in jax.tree.leaves(self.pool.pages)))

    monkeypatch.setattr(Flight, "release", noted)
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
    small = reading_pages()
    assert sum((7 + r.max_new_tokens) // 8 for r in requests) > 2 * small.catalogue.pages[DP2]
    expected, _ = subject("kv2").run(requests, subject("kv2").static(1))
    found, report = generate(small, requests, FixedLayout(DP2))
    check(requests, expected, found)
    assert report.preempted == 0 and ahead.count("launch") > 2


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("runs_ahead", [False, True], ids=["in turn", "ahead"])
def test_the_simulator_goes_the_same_way(runs_ahead, seed, monkeypatch):
    """Burst for burst: layouts, buckets, live sequences and steps."""
    monkeypatch.setattr(engine(), "runs_ahead", runs_ahead)
    planner = ScriptedPath(DP2, (Step(TP2, 7), Step(DP2, 4), Step(TP2, 2)))
    check_simulator(engine(), planner, seed, has_pools=False)


@pytest.mark.slow  # compiles an engine of its own
@pytest.mark.parametrize("seed", range(6))
def test_the_simulator_goes_the_same_way_where_rows_and_pages_are_scarce(seed):
    """Who waits, and bursts that end because pages run out, or for those that wait."""
    small = engine(kv_pages=10, capacity=4)
    planner = ScriptedPath(DP2, (Step(TP2, 7), Step(DP2, 4))) if seed % 2 else FixedLayout(DP2)
    report = check_simulator(small, planner, seed, has_pools=True)
    assert report.preempted > 0 or report.switches, "pages that are scarce"


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
    catalogue, splits = engine.catalogue, tuple(engine.layouts)
    truth = made_up_latency(
        dict.fromkeys(splits, 1.0),
        dict.fromkeys(splits, 0.0),
        reslice=0.0,
        migrate_per_token=0.0,
        max_rows=16,
        lengths=catalogue.buckets.lengths,
    )
    memory = MemoryModel(
        limit=1e9,
        resident=0,
        weights=dict.fromkeys(splits, 1),
        page=dict.fromkeys(splits, 1),
        pages=catalogue.pages,
        page_size=catalogue.page_size,
        chunk=1,
        staging=1,
        ahead=4,
    )
    machine = Machine(
        truth,
        splits,
        catalogue.buckets,
        catalogue.functions.burst_steps,
        catalogue.functions.check_every,
        memory,
        runs_ahead=engine.runs_ahead,
        has_pools=has_pools,
    )
    simulated = replay(Workload(prompts, responses, 40), planner, machine)
    assert [(b.split, b.rows) for b in simulated.bursts] == [b[:2] for b in report.bursts]
    assert [b.live for b in simulated.bursts] == report.live
    assert simulated.trace.steps == tuple(report.steps)
    assert [s.step for s in simulated.trace.switches] == [s.step for s in report.switches]
    assert simulated.num_preempted == report.preempted
    return report
