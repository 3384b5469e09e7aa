"""The lossless contract: switching layouts changes no token that was not a near-tie."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from bursts import crowded
from fakes import MODEL_PATHS, SETTINGS, AtStep, longest_requests, static_run, subject
from runs import finish, start

from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.engine.sequences.sampling import Sampling
from pat_jax.planning.planner.scripts import FixedLayout
from tests.lossless import CARRIES, MODELS, make_requests, tally
from tests.near_ties import (
    NEAR_TIE,
    TOLERANCE,
    Decisions,
    Noise,
    check_lossless,
    compare,
    decide,
)


@pytest.mark.parametrize("carry", CARRIES)
@pytest.mark.parametrize(("name", "path"), MODEL_PATHS, ids=str)
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


@pytest.mark.parametrize("name, path", [("kv8", (1, 8)), ("kv8", (8, 2)), ("kv2", (8, 1))])
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
    requests, static = static_run("kv8", seed=0)
    one = subject("kv8")
    with crowded([0, 5]):
        adaptive, report = one.run(requests, one.adaptive(path, "migrate", len(requests)))
    assert [switch.kv for switch in report.switches] == ["mixed"]
    check_lossless(one.compared(requests, static, adaptive))


@pytest.mark.parametrize("name", MODELS)
def test_every_layout_generates_the_same(name):
    requests, static = static_run(name, seed=1)
    one = subject(name)
    others = [one.run(requests, FixedLayout(split))[0] for split in one.engine.layouts]
    check_lossless(one.compared(requests, static, *others))


@pytest.mark.slow  # each compiles an engine of its own
@pytest.mark.parametrize(("weights", "lora_rank"), [("auto", 4), ("int8", 4), ("int8", 0)])
def test_other_weights_are_the_same_in_every_layout(weights, lora_rank):
    """Quantized ones, and adapters beside them, say something else, and switching changes none of it."""
    one, requests = subject("kv2", weights, lora_rank), make_requests(SETTINGS["kv2"], seed=0)
    static, _ = one.run(requests, one.static(1))
    plain = static_run("kv2", seed=0)[1]
    same = [a.tokens.tolist() == b.tokens.tolist() for a, b in zip(static, plain, strict=True)]
    assert np.mean(same) < 0.9
    for path in ((1, 2, 4, 8, 2), (8, 1)):
        adaptive, report = one.run(requests, one.adaptive(path, "mixed", len(requests)))
        assert len(report.switches) == len(path) - 1
        check_lossless(one.compared(requests, static, adaptive))


@pytest.mark.parametrize("name", MODELS)
def test_the_comparison_covers_what_it_should(name):
    """Every way to sample and to end, many lengths, and buckets that change on the way."""
    requests, static = static_run(name, seed=0)
    lengths = np.array([len(done.tokens) for done in static])
    assert lengths.min() < 6 and lengths.max() > 40 and len(set(lengths)) > 8
    assert {done.is_truncated for done in static} == {True, False}
    assert all(
        len(done.tokens) <= r.max_new_tokens for r, done in zip(requests, static, strict=True)
    )
    counts = tally(subject(name), requests, static, [static])
    assert all(total.tokens > 50 for total in counts.values())

    _, report = subject(name).run(requests, subject(name).static(8))
    buckets = subject(name).engine.specs.buckets
    assert {burst.rows for burst in report.bursts} == set(buckets.rows[report.bursts[0].split])
    assert {burst.length for burst in report.bursts} == set(buckets.lengths)
    assert report.tokens == lengths.sum()
    assert report.done_after == sorted(lengths)  # all decode from the first step on


def test_a_sequence_does_not_depend_on_its_company():
    """Half of the requests, in another order and so in other rows, replicas and buckets."""
    requests, static = static_run("kv8", seed=0)
    some = [13, 2, 7, 4, 11, 0, 9]
    fewer, one = [requests[i] for i in some], subject("kv8")
    alone, _ = one.run(fewer, one.static(2))
    check_lossless(one.compared(fewer, [static[i] for i in some], alone))


class TestJudge:
    """What the comparison would say of a rollout that is not lossless."""

    REQUEST = Request(tokens=(1,), key=np.zeros(2, np.uint32), max_new_tokens=3)
    STATIC = Completion(np.array([5, 6, 7]), np.array([-1.0, -2.0, -3.0]), True)

    def request(self, **sampling: Any) -> Request:
        return replace(self.REQUEST, sampling=Sampling(**sampling))

    def decisions(self, margins, filter_margins=(1.0, 1.0, 1.0)) -> Decisions:
        logprobs = self.STATIC.logprobs
        return Decisions(self.STATIC.tokens, logprobs, np.array(margins), np.array(filter_margins))

    def test_another_token_at_a_sure_decision_is_unexplained(self):
        other = replace(self.STATIC, tokens=np.array([5, 9, 7]))
        total = compare(self.STATIC, other, self.decisions([1.0, 0.5, 1.0]))
        assert (total.divergences, total.unexplained, total.compared) == (1, 1, 1)

    @pytest.mark.parametrize("margins", [[1.0, 0.5e-4, 1.0], [1.0, 0.5, 1.0]])
    def test_a_near_tie_of_choice_or_filter_explains_it(self, margins):
        other = replace(self.STATIC, tokens=np.array([5, 9, 7]))
        total = compare(self.STATIC, other, self.decisions(margins, (1.0, margins[1] / 1e4, 1.0)))
        assert (total.divergences, total.unexplained, total.near_ties) == (1, 0, 1)

    @pytest.mark.parametrize("tokens", [[5, 6], [5, 6, 7, 8]])
    def test_another_length_is_a_divergence(self, tokens):
        other = Completion(np.array(tokens), np.full(len(tokens), -1.0), True)
        total = compare(self.STATIC, other, self.decisions([1.0, 1.0, 1.0]))
        assert (total.divergences, total.unexplained) == (1, 1)

    def test_logprobs_are_compared_before_the_divergence_only(self):
        other = replace(self.STATIC, logprobs=np.array([-1.0, -2.5, -3.0]))
        decisions = self.decisions([1.0, 1.0, 1.0])
        assert compare(self.STATIC, other, decisions).max_logprob_difference == 0.5
        other = replace(other, tokens=np.array([9, 6, 7]))
        assert compare(self.STATIC, other, decisions).max_logprob_difference == 0.0

    def test_margins_of_a_known_distribution(self):
        logits = np.log([[0.5, 0.3, 0.15, 0.05]])
        taken = np.array([1])
        # In one block, and in two of two tokens each.
        flat = Noise(np.log([[1.0, 2.0, 1.0, 1.0]]), np.zeros((1, 1)))
        halves = Noise(np.log([[1.0, 2.0]]), np.log([[1.0, 3.0]]))
        greedy = decide(logits, flat, self.request(temperature=0.0), taken)
        np.testing.assert_allclose(greedy.margins, np.log(0.5 / 0.3))
        sampled = decide(logits, flat, self.REQUEST, taken)
        np.testing.assert_allclose(sampled.margins, np.log(0.6 / 0.5))
        np.testing.assert_allclose(sampled.logprobs, np.log(0.3))
        by_token = decide(logits, halves, self.REQUEST, taken)
        np.testing.assert_allclose(by_token.margins, np.log(0.6 / 0.5))
        by_block = decide(logits, halves._replace(blocks=np.log([[1.0, 3.9]])), self.REQUEST, taken)
        np.testing.assert_allclose(by_block.margins, np.log(0.8 / (3.9 * 0.2)))
        other = decide(logits, halves._replace(blocks=np.log([[1.0, 4.5]])), self.REQUEST, taken)
        assert (by_token.tokens[0], by_block.tokens[0], other.tokens[0]) == (1, 1, 2)
        filtered = decide(logits, flat, self.request(top_k=3, top_p=0.8), taken)
        np.testing.assert_allclose(filtered.margins, np.log(0.6 / 0.5))
        np.testing.assert_allclose(filtered.logprobs, np.log(0.3 / 0.8))
        # Cut to three, the likeliest two have the mass 0.8 / 0.95, the likeliest alone 0.5 / 0.95.
        np.testing.assert_allclose(filtered.filter_margins, 0.8 / 0.95 - 0.8)
        assert (greedy.tokens[0], sampled.tokens[0], filtered.tokens[0]) == (0, 1, 1)

    def test_a_wrong_token_in_a_real_run_is_noticed(self):
        requests, static = static_run("kv8", seed=0)
        decided = subject("kv8").judge.decisions(requests, static)[0]
        assert not decided.is_near_tie[1]
        tokens = static[0].tokens.copy()
        tokens[1] = (tokens[1] + 1) % 61
        spoiled = replace(static[0], tokens=tokens)
        assert compare(static[0], spoiled, decided).unexplained == 1
        again = subject("kv8").judge.decisions(requests[:1], [spoiled])[0]
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
