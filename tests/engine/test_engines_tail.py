"""The last sequences of a rollout continue in an engine on half of the devices, without a change."""

from dataclasses import replace
from functools import cache

import jax
import pytest
from fakes import SETTINGS, static_run, subject

from pat_jax.engine.engine import RolloutEngine, Tail
from pat_jax.engine.record.report import RolloutReport
from pat_jax.layout.layout import Layout
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.planner.scripts import FixedLayout, ScriptedPath, Step
from pat_jax.planning.types import MIGRATE_ALL, Split
from tests.lossless import EOS_IDS
from tests.near_ties import check_lossless

DP4, DP2, TP2 = Split(4, 1), Split(2, 2), Split(1, 2)


def engine_of(devices: slice, splits: list[Split], capacity: int) -> RolloutEngine:
    config = replace(SETTINGS["kv2"].rollout, min_rows=1, min_length=64)
    policy, given = subject("kv2").policy, jax.devices()[devices]
    every = RolloutEngine(policy, given, config, capacity=capacity, eos_ids=EOS_IDS).layouts
    layouts = {split: every[split] for split in splits}
    sizes = {"capacity": capacity, "eos_ids": EOS_IDS, "layouts": layouts}
    return RolloutEngine(policy, given, config, **sizes)


@cache
def engines() -> tuple[RolloutEngine, RolloutEngine]:
    """One on four devices, and one on the first two. Programs are compiled when they are needed."""
    return engine_of(slice(4), [DP4, DP2], 16), engine_of(slice(2), [TP2], 6)


def set_weights(engine: RolloutEngine, layout: Layout) -> None:
    policy = engine.policy
    engine.set_weights(
        jax.device_put(subject("kv2").params, layout.param_shardings(policy)), layout
    )


@pytest.mark.parametrize("at", [3, 6])
@pytest.mark.parametrize(
    "planner",
    [FixedLayout(DP4), ScriptedPath(DP4, (Step(DP2, 10, MIGRATE_ALL),))],
    ids=["static", "switching"],
)
def test_the_last_sequences_end_on_half_of_the_devices(planner: Planner, at: int):
    requests, expected = static_run("kv2", seed=0)
    whole, half = engines()
    set_weights(whole, whole.layouts[DP4])
    left: list[int] = []

    def begin() -> None:
        left.append(len(found))
        whole.release_weights()
        set_weights(half, half.layouts[TP2])

    report, found = RolloutReport(), {}
    tail = Tail(half, FixedLayout(TP2), at, begin)
    for i, done in whole.stream(requests, planner, report, tail=tail):
        found[i] = done
    half.release_weights()
    check_lossless(subject("kv2").compared(requests, expected, [found[i] for i in range(16)]))
    (began,) = left
    assert 0 < len(requests) - began <= at
    assert report.trace.path[-1] == str(TP2) and report.switches[-1].running == 16 - began
    assert report.tokens == sum(len(one.tokens) for one in found.values())
    assert report.prefill_tokens > sum(len(one.tokens) - 1 for one in requests)
    assert len(report.done_after) == 16 and report.kv_waste < 1


def test_a_rollout_that_ends_at_once_needs_no_tail():
    requests, expected = static_run("kv2", seed=0)
    whole, half = engines()
    set_weights(whole, whole.layouts[DP4])
    # All responses end in one burst.
    short = [replace(one, max_new_tokens=1) for one in requests]
    tail = Tail(half, FixedLayout(TP2), 6, lambda: pytest.fail("nothing is left"))
    report = RolloutReport()
    done = dict(whole.stream(short, FixedLayout(DP4), report, tail=tail))
    whole.release_weights()
    assert [done[i].tokens[0] for i in range(16)] == [one.tokens[0] for one in expected]
    assert not report.switches
