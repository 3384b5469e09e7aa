"""The lossless contract: switching layouts changes no token that was not a near-tie."""

import json
from dataclasses import replace

import numpy as np
import pytest
from bursts import crowded
from fakes import MODEL_PATHS, SETTINGS, AtStep, longest_requests, static_run, subject
from runs import finish, start

from pat_jax.planning.planner.scripts import FixedLayout
from tests.lossless import CARRIES, MODELS, make_requests
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
