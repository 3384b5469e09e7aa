"""The lossless contract: switching layouts changes no token that was not a near-tie."""

import json
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from bursts import crowded
from fakes import MODEL_PATHS, SETTINGS, AtStep, longest_requests, static_run, subject
from runs import finish, start

from pat_jax.engine.device.decode.sampling import sequence_key
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.record.report import RolloutReport
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.models.policy import Params
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.planner.scripts import FixedLayout, ScriptedPath, Step
from pat_jax.planning.types import MIGRATE_ALL, RECOMPUTE_ALL, Split
from tests.lossless import CARRIES, EOS_IDS, MODELS, make_requests
from tests.near_ties import (
    NEAR_TIE,
    TOLERANCE,
    check_lossless,
    compare,
)

# "kv2" splits heads and copies them: one head that all share, and one for each device, which a model with
# experts has in its own tests, are engines more to compile.
ENGINES = [pytest.param(x, marks=[pytest.mark.slow] * (x != "kv2")) for x in MODELS]


@pytest.mark.parametrize("carry", CARRIES)
@pytest.mark.parametrize(
    ("name", "path"),
    # Of "kv2" those with several switches go to and from all layouts.
    [
        pytest.param(*x, marks=[pytest.mark.slow] * (x[0] != "kv2" or x[1] == (1, 8)))
        for x in MODEL_PATHS
        if x != ("kv2", (8, 1))
    ],
    ids=str,
)
def test_switching_changes_no_token(name, path, carry):
    requests, static = static_run(name, seed=0)
    planner = subject(name).adaptive(path, carry, len(requests))
    adaptive, report = subject(name).run(requests, planner)

    tp = {str(split): split.tp for split in subject(name).engine.layouts}
    assert tuple(tp[switch.target] for switch in report.switches) == path[1:]
    ways = {switch.kv for switch in report.switches}
    assert carry in ways and (carry == "mixed" or len(ways) == 1)
    assert all(0 < switch.running < len(requests) for switch in report.switches)
    check_lossless(subject(name).compared(requests, static, adaptive))


@pytest.mark.parametrize(
    "name, path",
    [
        pytest.param("kv8", (1, 8), marks=pytest.mark.slow),
        pytest.param("kv8", (8, 1), marks=pytest.mark.slow),
        ("kv2", (8, 2)),
    ],
)
def test_a_full_pool_goes_along(name, path):
    """All 16 sequences at their longest, so that the pools hold nothing but live pages."""
    requests, one = longest_requests(SETTINGS[name]), subject(name)
    static, _ = one.run(requests, one.static(path[0]))
    splits = {split.tp: split for split in one.engine.layouts}
    planner = AtStep(splits[path[0]], splits[path[1]], step=48)
    adaptive, report = one.run(requests, planner)
    (switch,) = report.switches
    assert (switch.kv, switch.running) == ("migrate", len(requests))
    assert switch.sent is not None and switch.sent.total <= 1.05 * switch.sent.least
    pages, split = one.engine.specs.pages, splits[path[0]]
    held = -(-planner.context // SETTINGS[name].page_size)
    assert held.sum() >= 0.94 * split.dp * (pages[split] - 1)
    check_lossless(one.compared(requests, static, adaptive))


@pytest.mark.parametrize("path", [(1, 8), (8, 1)], ids=["up", "down"])
def test_what_finds_no_room_on_its_way_is_computed_anew(path):
    requests, static = static_run("kv2", seed=0)
    one = subject("kv2")
    with crowded([0, 5]):
        adaptive, report = one.run(requests, one.adaptive(path, "migrate", len(requests)))
    assert [switch.kv for switch in report.switches] == ["mixed"]
    check_lossless(one.compared(requests, static, adaptive))


@pytest.mark.parametrize("name", ENGINES)
def test_every_layout_generates_the_same(name):
    requests, static = static_run(name, seed=1)
    one = subject(name)
    others = [one.run(requests, FixedLayout(split))[0] for split in one.engine.layouts]
    check_lossless(one.compared(requests, static, *others))


@pytest.mark.slow  # each compiles an engine of its own
@pytest.mark.parametrize(
    ("name", "weights", "lora_rank"),
    [("kv2", "auto", 4), ("kv2", "int8", 4), ("kv2", "int8", 0), ("moe", "int8", 4)],
)
def test_other_weights_are_the_same_in_every_layout(name, weights, lora_rank):
    """Quantized ones, and adapters beside them, say something else, and switching changes none of it."""
    one, requests = subject(name, weights, lora_rank), make_requests(SETTINGS[name], seed=0)
    static, _ = one.run(requests, one.static(1))
    plain = static_run(name, seed=0)[1]
    same = [a.tokens.tolist() == b.tokens.tolist() for a, b in zip(static, plain, strict=True)]
    assert np.mean(same) < 0.9
    for path in ((1, 2, 8, 2), (8, 1)):
        adaptive, report = one.run(requests, one.adaptive(path, "mixed", len(requests)))
        assert len(report.switches) == len(path) - 1
        check_lossless(one.compared(requests, static, adaptive))


def test_a_sequence_does_not_depend_on_its_company():
    """Half of the requests, in another order and so in other rows, replicas and buckets."""
    requests, static = static_run("kv2", seed=0)
    some = [13, 2, 7, 4, 11, 0, 9]
    fewer, one = [requests[i] for i in some], subject("kv2")
    alone, _ = one.run(fewer, one.static(8))
    check_lossless(one.compared(fewer, [static[i] for i in some], alone))


def test_a_wrong_token_in_a_real_run_is_noticed():
    requests, static = static_run("kv2", seed=0)
    decided = subject("kv2").judge.decisions(requests, static)[0]
    assert not decided.is_near_tie[1]
    tokens = static[0].tokens.copy()
    tokens[1] = (tokens[1] + 1) % 61
    spoiled = replace(static[0], tokens=tokens)
    assert compare(static[0], spoiled, decided).unexplained == 1
    again = subject("kv2").judge.decisions(requests[:1], [spoiled])[0]
    assert compare(spoiled, static[0], again).judge_disagrees >= 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_tokens(tmp_path, capsys):
    """`python -m benchmarks.contracts.lossless`; bfloat16 is reported, not judged."""
    output = tmp_path / "lossless.json"
    program = ("-m", "benchmarks.contracts.lossless")
    finish(start("--out", str(output), program=program), timeout=3500)
    totals = json.loads(output.read_text())["summary"]
    with capsys.disabled():
        print(json.dumps(totals, indent=1))
    total = totals["float32"]["all"]
    assert total["compared"] >= 100_000
    assert total["unexplained"] == total["judge_disagrees"] == 0
    assert total["max_logprob_difference"] <= TOLERANCE
    assert total["near_tie_rate"] < 100 * NEAR_TIE  # of the choice, and of what filters keep
    assert totals["bfloat16"]["all"]["tokens"] > 10_000


DP2, TP2 = Split(2, 1), Split(1, 2)
WHOLE = 8  # pages of the longest sequence


@cache
def scarce_engine() -> RolloutEngine:
    """Four rows on two devices, and pages for one whole sequence and a part of another in each. Its programs
    are compiled when they are needed."""
    settings = SETTINGS["kv2"]
    config = replace(settings.rollout, min_rows=1, min_length=64, kv_pages=WHOLE + 2)
    scarce_engine = RolloutEngine(
        subject("kv2").policy, jax.devices()[:2], config, capacity=4, eos_ids=EOS_IDS
    )
    assert scarce_engine.specs.width(scarce_engine.specs.buckets.lengths[-1]) == WHOLE
    return scarce_engine


def run_here(
    requests: list[Request], planner: Planner, params: Params | None = None
) -> tuple[list[Completion], RolloutReport]:
    """From DP2 on."""
    layout, policy = scarce_engine().layouts[DP2], scarce_engine().policy
    weights = jax.device_put(params or subject("kv2").params, layout.param_shardings(policy))
    scarce_engine().set_weights(weights, layout)
    done = scarce_engine().rollout(requests, planner)
    scarce_engine().release_weights()
    return done


def check_found(
    requests: list[Request], expected: list[Completion], found: list[Completion]
) -> None:
    check_lossless(subject("kv2").compared(requests, expected, found))


@pytest.mark.slow  # compiles an scarce_engine of its own
@pytest.mark.parametrize("below", [MIGRATE_ALL, RECOMPUTE_ALL], ids=["migrate", "recompute"])
def test_waiting_and_making_room_change_no_token(below):
    """Four times as many sequences as rows, those preempted recomputed, in switches as well."""
    requests, expected = static_run("kv2", seed=0)
    for planner in (
        FixedLayout(DP2),
        ScriptedPath(DP2, (Step(TP2, 12, below), Step(DP2, 6, below), Step(TP2, 2, below))),
    ):
        found, report = run_here(requests, planner)
        check_found(requests, expected, found)
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
    found, report = run_here(short, FixedLayout(DP2))
    assert [len(done.tokens) for done in found if done.is_truncated] == [
        request.max_new_tokens
        for request, done in zip(short, found, strict=True)
        if done.is_truncated
    ]
    assert len(found) == 200 and all(1 <= len(done.tokens) <= 5 for done in found)
    assert len(report.done_after) == 200


def test_free_rows_do_not_wait_for_the_end_of_a_burst():
    """Three responses of 13 tokens, and short ones one after the other in the fourth row."""
    functions = scarce_engine().specs.functions
    most = [13, 13, 13, 1, 1, 1, 1, 1]
    requests = [
        Request((3, 4, 5), sequence_key(11, i), n, ignore_eos=True) for i, n in enumerate(most)
    ]
    found, report = run_here(requests, FixedLayout(TP2))
    assert [len(done.tokens) for done in found] == most
    assert functions.burst_steps == 2 * functions.check_every == 4
    assert report.done_after[:5] == [1, 3, 5, 7, 9]


def test_a_prompt_is_computed_once_for_its_samples():
    """Whole pages are shared, a part page copied: once in each replica, whatever the number of
    samples."""
    rng = np.random.default_rng(3)
    prompt = tuple(rng.integers(3, 61, 11).tolist())  # a page of eight tokens and two of the next
    samples = [Request(prompt, sequence_key(5, i), 20, ignore_eos=True) for i in range(4)]
    found, report = run_here(samples, FixedLayout(DP2))
    assert report.prefill_tokens == 2 * 10
    expected, _ = subject("kv2").run(samples, subject("kv2").static(1))
    total = subject("kv2").compared(samples, expected, found)
    assert total.unexplained == 0 and total.compared > 60
    assert len({tuple(done.tokens.tolist()) for done in found}) == 4


def test_the_pages_of_a_failed_request_spoil_nobody_elses():
    config = scarce_engine().policy.config
    padding = config.vocab_size  # an embedding that no sound request reads
    assert padding < config.padded_vocab_size
    params = jax.tree.map(np.array, subject("kv2").params)
    params["embedding"][padding] = np.nan
    good, expected = static_run("kv2", seed=0)
    # Each fills nearly the whole pool of its replica: whoever comes next gets its pages.
    longest = scarce_engine().specs.buckets.lengths[-1]
    poisoned = [
        replace(request, tokens=(padding,) * (longest - 1), max_new_tokens=1)
        for request in good[:2]
    ]
    found, _ = run_here([*poisoned, *good], FixedLayout(DP2), params)
    assert all(done.error for done in found[:2])
    assert not any(done.error for done in found[2:])
    check_found(good, expected, found[2:])
