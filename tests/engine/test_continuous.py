"""More sequences than rows or pages, and prompts that begin alike, on real devices."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from fakes import SETTINGS, static_run, subject

from pat_jax.engine.device.decode.sampling import sequence_key
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.record.report import RolloutReport
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.models.policy import Params
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.planner.scripts import FixedLayout, ScriptedPath, Step
from pat_jax.planning.types import MIGRATE_ALL, RECOMPUTE_ALL, Split
from tests.lossless import EOS_IDS, make_requests
from tests.near_ties import check_lossless

DP2, TP2 = Split(2, 1), Split(1, 2)
WHOLE = 8  # pages of the longest sequence


@cache
def engine() -> RolloutEngine:
    """Four rows on two devices, and pages for one whole sequence and a part of another in each. Its programs
    are compiled when they are needed."""
    settings = SETTINGS["kv2"]
    config = replace(settings.rollout, min_rows=1, min_length=64, kv_pages=WHOLE + 2)
    engine = RolloutEngine(
        subject("kv2").policy, jax.devices()[:2], config, capacity=4, eos_ids=EOS_IDS
    )
    assert engine.specs.width(engine.specs.buckets.lengths[-1]) == WHOLE
    return engine


def run(
    requests: list[Request], planner: Planner, params: Params | None = None
) -> tuple[list[Completion], RolloutReport]:
    """From DP2 on."""
    layout, policy = engine().layouts[DP2], engine().policy
    weights = jax.device_put(params or subject("kv2").params, layout.param_shardings(policy))
    engine().set_weights(weights, layout)
    done = engine().rollout(requests, planner)
    engine().release_weights()
    return done


def check(requests: list[Request], expected: list[Completion], found: list[Completion]) -> None:
    check_lossless(subject("kv2").compared(requests, expected, found))


@pytest.mark.slow  # compiles an engine of its own
@pytest.mark.parametrize("below", [MIGRATE_ALL, RECOMPUTE_ALL], ids=["migrate", "recompute"])
def test_waiting_and_making_room_change_no_token(below):
    """Four times as many sequences as rows, those preempted recomputed, in switches as well."""
    requests, expected = static_run("kv2", seed=0)
    for planner in (
        FixedLayout(DP2),
        ScriptedPath(DP2, (Step(TP2, 12, below), Step(DP2, 6, below), Step(TP2, 2, below))),
    ):
        found, report = run(requests, planner)
        check(requests, expected, found)
        assert report.preempted > 0
        assert max(report.trace.running) <= 4 and report.tokens == sum(len(x.tokens) for x in found)
        known = sum(len(request.tokens) - 1 for request in requests)
        assert report.prefill_tokens > known  # some of it a second time
    assert len(report.switches) == 3


def test_many_times_more_sequences_than_rows_all_come_out_in_order():
    requests = make_requests(SETTINGS["kv2"], 0)
    short = [
        replace(requests[i % 16], key=sequence_key(7, i), max_new_tokens=1 + i % 5)
        for i in range(200)
    ]
    found, report = run(short, FixedLayout(DP2))
    assert [len(done.tokens) for done in found if done.is_truncated] == [
        request.max_new_tokens
        for request, done in zip(short, found, strict=True)
        if done.is_truncated
    ]
    assert len(found) == 200 and all(1 <= len(done.tokens) <= 5 for done in found)
    assert len(report.done_after) == 200


def test_free_rows_do_not_wait_for_the_end_of_a_burst():
    """Three responses of 13 tokens, and short ones one after the other in the fourth row."""
    functions = engine().specs.functions
    most = [13, 13, 13, 1, 1, 1, 1, 1]
    requests = [
        Request((3, 4, 5), sequence_key(11, i), n, ignore_eos=True) for i, n in enumerate(most)
    ]
    found, report = run(requests, FixedLayout(TP2))
    assert [len(done.tokens) for done in found] == most
    assert functions.burst_steps == 2 * functions.check_every == 4
    assert report.done_after[:5] == [1, 3, 5, 7, 9]


def test_a_prompt_is_computed_once_for_its_samples():
    """Whole pages are shared, a part page copied: once in each replica, whatever the number of
    samples."""
    rng = np.random.default_rng(3)
    prompt = tuple(rng.integers(3, 61, 11).tolist())  # a page of eight tokens and two of the next
    samples = [Request(prompt, sequence_key(5, i), 20, ignore_eos=True) for i in range(4)]
    found, report = run(samples, FixedLayout(DP2))
    assert report.prefill_tokens == 2 * 10
    expected, _ = subject("kv2").run(samples, subject("kv2").static(1))
    total = subject("kv2").compared(samples, expected, found)
    assert total.unexplained == 0 and total.compared > 60
    assert len({tuple(done.tokens.tolist()) for done in found}) == 4


def test_the_pages_of_a_failed_request_spoil_nobody_elses():
    config = engine().policy.config
    padding = config.vocab_size  # an embedding that no sound request reads
    assert padding < config.padded_vocab_size
    params = jax.tree.map(np.array, subject("kv2").params)
    params["embedding"][padding] = np.nan
    good, expected = static_run("kv2", seed=0)
    # Each fills nearly the whole pool of its replica: whoever comes next gets its pages.
    longest = engine().specs.buckets.lengths[-1]
    poisoned = [
        replace(request, tokens=(padding,) * (longest - 1), max_new_tokens=1)
        for request in good[:2]
    ]
    found, _ = run([*poisoned, *good], FixedLayout(DP2), params)
    assert all(done.error for done in found[:2])
    assert not any(done.error for done in found[2:])
    check(good, expected, found[2:])
