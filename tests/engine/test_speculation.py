"""Drafts change no token: every kind of sampling and of ending, with switches, on pages and copies."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from after_warm_up import measured, run_compiling_nothing
from restless import Restless
from two_devices import DP2, TP2, engine, generate, reading_pages

from pat_jax.common.hosts.together import ProcessGroup
from pat_jax.engine.device.decode.sampling import sequence_key
from pat_jax.engine.device.draft.text_drafter import TextDrafter
from pat_jax.engine.device_executor import Digest
from pat_jax.engine.record.report import RolloutReport
from pat_jax.engine.sequences.earlier import EarlierResponses
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.engine.sequences.sampling import Sampling
from pat_jax.layout.buckets import Drafts
from pat_jax.planning.draft_counts import BRANCHES
from pat_jax.planning.draft_counts import DRAFTS as DRAFTS_OF_RUNS
from pat_jax.planning.drafts import Acceptance
from pat_jax.planning.planner.scripts import FixedLayout, ScriptedPath, Step
from pat_jax.planning.types import MIGRATE_ALL, RECOMPUTE_ALL, Split
from tests.lossless import MODELS, Settings, Subject, tally
from tests.near_ties import Tally

pytestmark = pytest.mark.usefixtures("free_pages")

DRAFTS = Drafts(num_draft_tokens=(3,), longest=5, most_tokens=256, texts=8)
ACCEPT_PROB = Acceptance.unseen().accept_prob
SETTINGS = Settings(min_rows=16, min_length=64, max_logprobs=2, drafter=TextDrafter(DRAFTS))
KINDS = (
    Sampling(temperature=0.0),
    Sampling(temperature=0.7, logprobs=2),
    Sampling(temperature=0.8, top_k=12, top_p=0.9),
    Sampling(temperature=0.7, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.3),
)


@cache
def subject() -> Subject:
    """With TP 2 the KV head has a copy."""
    return Subject(replace(MODELS["kv2"], num_kv_heads=1), SETTINGS, num_devices=2)


def asked_twice(kinds: tuple[Sampling, ...] = KINDS, count: int = 16) -> list[Request]:
    """Samples of four prompts, and the same ones again when they have ended: those find every token of
    theirs in a text, which random weights do not give by themselves."""
    rng = np.random.default_rng(3)
    prompts = [tuple(rng.integers(3, 61, 10).tolist()) for _ in range(4)]
    once = [
        Request(
            tokens=prompts[i % 4],
            key=sequence_key(7, i),
            max_new_tokens=52 - i,
            sampling=kinds[i // 4 % len(kinds)],
            ignore_eos=i % 3 > 0,
        )
        for i in range(count)
    ]
    return once * 2


@cache
def static() -> tuple[list[Request], list[Completion]]:
    requests = asked_twice()
    return requests, subject().run(requests, subject().static(1))[0]


def check(found: list[Completion], report: RolloutReport, least: float) -> None:
    """
    Args:
      least: tokens that a row generates in a step, on average.
    """
    requests, expected = static()
    total = sum(tally(subject(), requests, expected, [found]).values(), Tally())
    assert total.unexplained == total.judge_disagrees == 0
    assert total.compared > 0.9 * total.tokens > 500
    assert total.max_logprob_difference <= 1e-4
    assert report.tokens == sum(len(done.tokens) for done in found)
    assert report.tokens_per_row_step > least
    assert report.accepted == report.tokens - report.busy_rows <= report.drafted
    own, siblings, earlier = np.array(report.by_source)
    assert (own + siblings).tolist()[:2] == [report.drafted, report.accepted]
    assert siblings[1] > 0.5 * report.accepted and not np.any(earlier)


@pytest.mark.parametrize("tp", [1, 2])
def test_drafts_change_no_token(tp):
    requests, expected = static()
    planner = replace(subject().static(tp), num_draft_tokens=3, accept_prob=ACCEPT_PROB)
    found, report = subject().run(requests, planner)
    check(found, report, least=1.4)
    assert {burst.num_draft_tokens for burst in report.bursts} == {3}
    for one, other in zip(expected, found, strict=True):
        if one.tokens.tolist() != other.tokens.tolist():
            continue  # a near-tie
        for name in ("unfiltered_logprobs", "top_logprobs"):
            pair = getattr(one, name), getattr(other, name)
            assert (pair[0] is None) == (pair[1] is None)
            if pair[0] is not None:
                np.testing.assert_allclose(*pair, atol=1e-4)


def test_a_branch_beside_a_draft_says_the_same_tokens_in_fewer_steps():
    chains = np.stack([ACCEPT_PROB[DRAFTS_OF_RUNS], np.zeros_like(ACCEPT_PROB[BRANCHES])])
    steps, on_branches = [], []
    for accept_prob in (chains, ACCEPT_PROB):
        planner = replace(subject().static(1), num_draft_tokens=3, accept_prob=accept_prob)
        found, report = subject().run(static()[0], planner)
        check(found, report, least=1.3)
        steps.append(report.busy_rows)
        on_branches.append(sum(numbers[2] for numbers in report.by_source))
    assert steps[1] < steps[0] and on_branches[0] == 0 and on_branches[1] > 10


def test_switches_change_no_token_either():
    (requests, _), path = static(), (1, 2, 1)
    planner = subject().adaptive(path, "mixed", len(requests))
    found, report = subject().run(
        requests, replace(planner, num_draft_tokens=3, accept_prob=ACCEPT_PROB)
    )
    assert len(report.switches) == len(path) - 1
    check(found, report, least=1.4)


def test_sequences_that_move_between_groups_say_the_same():
    """What drafts have written behind a sequence's newest token is sent by none."""
    planner = Restless(Split(2, 1), num_draft_tokens=3, accept_prob=ACCEPT_PROB)
    found, report = subject().run(static()[0], planner)
    check(found, report, least=1.4)
    assert len(report.balanced) > 2


@pytest.mark.parametrize("samples", [1, 4])
def test_earlier_responses_change_no_token_and_save_steps(samples):
    """Of one sample of a prompt as well, which has no others to draft from."""
    requests, expected = static()
    requests, expected = requests[: 4 * samples], expected[: 4 * samples]
    earlier = EarlierResponses(10_000, subject().engine.text_room)
    for i in range(4):
        generated = [np.asarray(done.tokens) for done in expected[i::4]]
        earlier.put(requests[i].tokens, generated)
    planner, reports = replace(subject().static(1), num_draft_tokens=3, accept_prob=ACCEPT_PROB), []
    for store in (None, earlier):
        found, report = subject().run(requests, planner, earlier=store)
        total = sum(tally(subject(), requests, expected, [found]).values(), Tally())
        assert total.unexplained == total.judge_disagrees == 0
        assert total.max_logprob_difference <= 1e-4
        drafted, accepted, on_branches = np.sum(report.by_source, axis=0).tolist()
        assert (drafted, accepted) == (report.drafted, report.accepted) and on_branches < accepted
        reports.append(report)
    plain, better = reports
    assert better.tokens == plain.tokens
    assert better.tokens_per_row_step > 1.4 > 1.2 > plain.tokens_per_row_step
    assert better.by_source[2][1] > 0.8 * better.accepted
    assert not np.any(plain.by_source[2])


ENDINGS = (
    Sampling(temperature=0.7, stop_token_ids=(5, 9, 17)),
    Sampling(temperature=0.7, stop_token_ids=(5, 9, 17), min_tokens=20),
    Sampling(temperature=0.0, min_tokens=30),
)


def test_responses_end_where_they_do_without_drafts():
    """At tokens that end them, not before they may, and at every number of tokens, one among them."""
    requests = asked_twice(ENDINGS, count=15)
    requests = [
        replace(x, ignore_eos=False, max_new_tokens=1 + i % 5 if i % 4 == 0 else x.max_new_tokens)
        for i, x in enumerate(requests)
    ]
    expected, _ = subject().run(requests, subject().static(1))
    planner = replace(subject().static(1), num_draft_tokens=3, accept_prob=ACCEPT_PROB)
    found, report = subject().run(requests, planner)
    assert [x.tokens.tolist() for x in found] == [x.tokens.tolist() for x in expected]
    assert [x.is_truncated for x in found] == [x.is_truncated for x in expected]
    assert {x.is_truncated for x in found} == {True, False}
    assert report.accepted > 60


def test_after_the_warm_up_nothing_is_compiled():
    one, requests = subject(), static()[0]
    planner = measured(one)
    ((found, report),) = run_compiling_nothing(one, requests, planner)
    assert {burst.num_draft_tokens for burst in report.bursts} >= {3}
    check(found, report, least=1.3)
    assert planner.acceptance is not None
    assert planner.acceptance.proposed.sum() > 100
    drafts = report.drafts
    assert drafts.steps == sum(burst.steps for burst in report.bursts if burst.num_draft_tokens)
    assert drafts.tokens / drafts.steps > 1.3 and drafts.expected_tokens / drafts.steps > 1
    assert drafts.predicted_saving_s > 0 and "acceptance length" in drafts.words


@pytest.mark.slow  # an engine for each
@pytest.mark.parametrize(
    ("make", "sizes"),
    [  # not `engine` itself, which would keep it for other files
        (engine.__wrapped__, {"min_rows": 8}),
        (reading_pages, {"min_rows": 4, "kv_pages": 12, "capacity": 6}),
    ],
    ids=["copied", "scarce pages"],
)
def test_bursts_are_dispatched_ahead_with_drafts(make, sizes):
    """On two devices; pages that drafts have drawn are free again, and where pages lack fewer are drafted."""
    requests, one = asked_twice(), make(drafts=DRAFTS, **sizes)
    expected, plain = generate(one, requests, FixedLayout(DP2))
    assert plain.tokens_per_row_step == 1 and plain.drafted == 0
    for below in (MIGRATE_ALL, RECOMPUTE_ALL):
        steps = Step(TP2, 24, below), Step(DP2, 16, below), Step(TP2, 6, below)
        planner = ScriptedPath(DP2, steps, num_draft_tokens=3, accept_prob=ACCEPT_PROB)
        found, report = generate(one, requests, planner)
        same = [
            a.tokens.tolist() == b.tokens.tolist() for a, b in zip(expected, found, strict=True)
        ]
        assert np.mean(same) > 0.9  # the others' first difference is judged where layouts are
        assert report.accepted > 100 and len(report.switches) >= 2


def test_what_drafts_come_from_is_compared(monkeypatch):
    """By all processes, before each burst: another belief and another text are differences with a name."""
    requests, told = asked_twice(count=8)[:8], []
    monkeypatch.setattr(
        ProcessGroup, "compare", lambda self, name, value: told.append((name, value))
    )

    def digest(accept_prob: np.ndarray = ACCEPT_PROB, token: int = 6) -> Digest:
        earlier = EarlierResponses(1000, 100)
        earlier.put(requests[0].tokens, [np.array([5, token])])
        told.clear()
        subject().run(
            requests,
            replace(subject().static(1), num_draft_tokens=3, accept_prob=accept_prob),
            earlier=earlier,
        )
        return next(value for name, value in told if name == "burst")

    one = digest()
    for two, other in (
        (digest(), []),
        (digest(accept_prob=0.9 * ACCEPT_PROB), ["accept_prob"]),
        (digest(token=7), ["drafts"]),
    ):
        assert [name for name in one._fields if getattr(one, name) != getattr(two, name)] == other
        assert all(f"{name}=" in str(one) for name in other)  # as the error has it


def test_logits_that_are_no_numbers_end_a_response_with_drafts():
    one = subject()
    poisoned = jax.tree.map(lambda x: np.array(x), one.params)
    poisoned["embedding"][17] = np.nan  # whoever says it
    layout = next(iter(one.engine.layouts.values()))
    one.engine.set_weights(jax.device_put(poisoned, layout.param_shardings(one.policy)), layout)
    requests = [replace(x, ignore_eos=True) for x in asked_twice(count=8)]
    planner = replace(one.static(1), num_draft_tokens=3, accept_prob=ACCEPT_PROB)
    found, _ = one.engine.rollout(requests, planner)
    one.engine.release_weights()
    assert any(done.error for done in found)
    assert all(np.isfinite(done.logprobs).all() for done in found)
