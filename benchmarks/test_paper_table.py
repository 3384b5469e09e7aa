"""The paper's evaluation: lengths through the known quantiles, shares of time, gains."""

import numpy as np
import pytest

from benchmarks.naive import NaiveThreshold
from benchmarks.paper_settings import PAPER, Published, Setting
from benchmarks.paper_table import ADAPTIVE, LEFT, NAIVE, STATICS, share_after_switch, summary
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.profiling.simulate.simulator import replay

SMALL = Setting("h100:8", "qwen3-0.6b", 16_384, responses=16)


@pytest.mark.parametrize("setting", PAPER, ids=str)
def test_lengths_go_through_both_quantiles(setting: Setting):
    lengths = setting.lengths(np.random.default_rng(0), 200_000)
    assert (lengths > 8192).mean() == pytest.approx(0.1085, abs=0.003)
    assert 128 * (lengths >= setting.cap).mean() == pytest.approx(2.8, abs=0.2)


def test_the_share_of_generation_follows_from_the_two_published_figures():
    published = Published(throughput=1.37, less_generation=34.6)
    share = published.generation_share
    assert 1 / (1 - share * 0.346) == pytest.approx(1.37)
    assert 0.6 < share < 0.9


def test_what_lies_behind_the_first_switch():
    machine, workload = SMALL.machine(None), SMALL.workload(0)
    splits = machine.splits
    assert share_after_switch(replay(workload, FixedLayout(splits[0]), machine)) == 0.0
    run = replay(workload, NaiveThreshold(splits), machine)
    first = run.trace.switches[0]
    before = sum(burst.seconds for burst in run.bursts if str(burst.split) == first.source)
    expected = 1 - (before + run.spent("prefill")) / run.total_s
    assert share_after_switch(run) == pytest.approx(expected)


def test_gains_are_over_the_best_static_of_each_batch():
    seconds = {name: [10.0, 10.0] for name in (*STATICS, *LEFT, NAIVE)}
    seconds |= {"static tp1": [8.0, 16.0], "static tp2": [16.0, 8.0], ADAPTIVE: [4.0, 8.0]}
    none = {"share_after_switch": [0, 0], "switch_s": [0, 0], "switches": [0, 0]}
    found = {"seconds": seconds, **none, "paths": {}, "costs": ""}
    table = summary(found, share=0.5)
    gains = table["less_generation_time"]
    assert isinstance(gains, dict)
    assert gains["best static"]["mean"] == 25.0  # half of 8, none of 8
    assert gains["static tp1"]["mean"] == 50.0
