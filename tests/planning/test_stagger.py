"""Samples of a prompt that begin one after the other: the order, the schedule, and when it is expected to pay."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_machines import FASTER_WITH_TP, TP8, lengths_of, machine

from pat_jax.engine.layout.buckets import Drafts
from pat_jax.planning.drafts import Acceptance
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.planning.planner.stagger import (
    FIRST_TOKENS,
    LEADERS,
    WORTH,
    Queue,
    Schedule,
    staggered,
)
from pat_jax.planning.types import Load

DRAFTS = Drafts(budgets=(1, 3, 7), longest=7, most_tokens=256)
prompts = st.lists(st.integers(0, 5), min_size=1, max_size=40).map(np.array)
many_samples = st.lists(st.integers(0, 1), min_size=16, max_size=40).map(np.array)


def queue_of(prompt: np.ndarray, rows: int, *, tokens=20, cap=200, has_earlier=False) -> Queue:
    count = len(prompt)
    none, full = np.zeros(count, int), np.full(count, cap)
    load = Load(none, none, np.full(count, tokens), full)
    return Queue(load, np.arange(count), prompt, np.full(count, has_earlier), rows)


@given(prompts | many_samples, st.randoms())
def test_the_first_samples_begin_one_after_the_other(prompt: np.ndarray, random):
    order = list(range(len(prompt)))
    random.shuffle(order)
    samples = {p: [i for i in order if prompt[i] == p] for p in prompt.tolist()}
    turn = {i: k for of_prompt in samples.values() for k, i in enumerate(of_prompt)}
    expected = [i for k in range(LEADERS) for i in order if turn[i] == k]
    expected += [i for i in order if turn[i] >= LEADERS]
    assert staggered(np.array(order), prompt).tolist() == expected


@given(prompts, st.integers(1, 8), st.floats(0.0, 3.0), st.booleans(), st.integers(0, 99))
def test_a_schedule_fills_rows_as_they_become_free(prompt, rows, right, has_earlier, seed):
    queue = queue_of(prompt, rows, has_earlier=has_earlier)
    lengths = np.random.default_rng(seed).integers(1, 200, len(prompt)).astype(float)
    found = Schedule.of(queue, queue.order, lengths, rows, right)
    begin, end = found.begin, found.end
    for i, now in enumerate(begin.tolist()):
        before = np.arange(len(prompt)) < i
        running = before & (begin <= now) & (end > now)
        assert running.sum() < rows, "it has a row"
        if i >= rows:
            assert now in end[:i], "when one becomes free"
        siblings = before & (prompt == prompt[i])
        whole = int((siblings & (end <= now)).sum())
        assert found.whole[i] == whole
    are_alone = [
        not ((np.arange(len(prompt)) < i) & (prompt == prompt[i]) & (end > begin[i])).any()
        for i in range(len(prompt))
    ]
    assert found.num_alone == sum(are_alone)
    is_first = found.whole == 0
    np.testing.assert_allclose((end - begin)[is_first], lengths[is_first])
    assert (end - begin <= lengths + 1e-9).all()


def test_what_whole_siblings_are_worth_makes_rows_faster():
    queue = queue_of(np.zeros(2, int), 1)
    found = Schedule.of(queue, queue.order, np.array([100.0, 100.0]), 1, right=1.0)
    assert found.whole.tolist() == [0, 1]
    assert found.end[1] - found.begin[1] == pytest.approx(100 * 2 / (2 + WORTH))
    long = np.full(2, FIRST_TOKENS + 1000.0)
    found = Schedule.of(queue, queue.order, long, 1, right=1.0)
    assert found.end[1] - found.begin[1] == pytest.approx(1000 + FIRST_TOKENS * 2 / (2 + WORTH))


def test_a_schedule_is_seen_between_edges():
    queue = queue_of(np.arange(3), 2, tokens=10)
    found = Schedule.of(queue, queue.order, np.array([100.0, 50.0, 100.0]), 2, right=0.0)
    live, mean, longest = found.at(np.array([0, 50, 100, 200]))
    np.testing.assert_allclose(live, [2, 2, 0.5])
    np.testing.assert_allclose(mean, [35, 60, 85 + 0.0])
    np.testing.assert_allclose(longest, [60, 110, 110])


@settings(deadline=None)
@given(st.integers(1, 3))
def test_lengths_are_drawn_as_the_model_has_them(seed: int):
    known = lengths_of((60, 300), (150, 100 * seed))
    queue = queue_of(np.arange(4000), 8, cap=400)
    drawn = queue.drawn(known)
    assert np.array_equal(drawn, queue.drawn(known)), "the same each time"
    share = 300 / (300 + 100 * seed)
    assert np.mean(drawn < 100) == pytest.approx(share, abs=0.03)
    assert np.median(drawn[drawn < 100]) == pytest.approx(60, rel=0.1)
    assert np.median(drawn[drawn > 100]) == pytest.approx(150, rel=0.1)


def planner(**options) -> CostModelPlanner:
    """One layout; a step costs as much with drafts as without, and rows are free."""
    base = machine(FASTER_WITH_TP, **options).on(
        dict.fromkeys(FASTER_WITH_TP, (1, 2, 4, 8, 16, 32, 64)), (64, 512)
    )
    verify = {
        (split, rows, length, budget): seconds
        for (split, rows, length), seconds in base.decode_table.items()
        for budget in DRAFTS.of(rows)
    }
    latency = replace(base, verify_table=verify)
    beliefs = {"acceptance": Acceptance.unseen(), "drafts": DRAFTS.limits}
    return CostModelPlanner((TP8,), latency, lengths_of((100, 500), (140, 500)), **beliefs)


SAMPLES = np.repeat(np.arange(16), 16)  # of 16 prompts each


def test_it_pays_where_sequences_wait_and_draft():
    found = planner().stagger(queue_of(SAMPLES, 32), TP8)
    assert found is not None and found.is_on, found
    assert found.predicted_saving_s > 0 and "whole siblings" in found.reason


@pytest.mark.parametrize("rows", [256, 300])
def test_where_none_waits_it_is_no_matter(rows: int):
    assert planner().stagger(queue_of(SAMPLES, rows), TP8) is None


def test_earlier_responses_leave_little_to_whole_siblings():
    found = planner().stagger(queue_of(SAMPLES, 32, has_earlier=True), TP8)
    assert found is not None and not found.is_on


def test_it_does_not_pay_where_nothing_is_drafted():
    plain = planner()
    without = replace(plain, latency=replace(plain.latency, verify_table={}))
    found = without.stagger(queue_of(SAMPLES, 32), TP8)
    assert found is not None and not found.is_on and "nothing is drafted" in found.reason


def test_prompts_that_are_computed_again_are_priced():
    """With prompts so long that a prefill takes as long as many steps."""
    queue = queue_of(SAMPLES, 32, tokens=400)
    cheap, dear = planner(), planner()
    dear = replace(
        dear,
        latency=replace(
            dear.latency,
            prefill_table={key: 100 * s for key, s in dear.latency.prefill_table.items()},
        ),
    )
    one, other = (x.stagger(queue, TP8) for x in (cheap, dear))
    assert one is not None and other is not None
    assert other.predicted_cost_s == pytest.approx(100 * one.predicted_cost_s)
    assert one.predicted_cost_s > 0 and not other.is_on
