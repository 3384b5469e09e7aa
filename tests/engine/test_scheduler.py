"""Scheduler by cases with a known answer, and at length."""

from dataclasses import replace

import numpy as np
import pytest
from bursts import burst, carry

from pat_jax.engine.relocation.rounds import Shipment
from pat_jax.engine.scheduler import Scheduler
from pat_jax.engine.sequences.page_allocator import NULL_PAGE
from pat_jax.engine.sequences.responses import Request, Responses
from pat_jax.engine.sequences.sequence_table import NO_ROW

BURST = 4


def make_scheduler(requests: list[Request], *, num_groups=1, num_pages=1000, **options):
    responses = Responses.of(requests, num_groups=num_groups, rows_per_group=1)
    return Scheduler(responses, num_pages=num_pages, page_size=4, **options)


def plain(count: int, prompt: int = 5, most: int = 9) -> list[Request]:
    """Prompts that have nothing in common."""
    rng = np.random.default_rng(1)
    return [
        Request(tuple(rng.integers(0, 10**6, prompt).tolist()), np.zeros(2, np.uint32), most)
        for _ in range(count)
    ]


def arrivals(shipments: list[Shipment]) -> list[int]:
    """Where pages arrive in the only group there is."""
    pages = np.concatenate([one.new_page.ravel() for one in shipments])
    return pages[pages != NULL_PAGE].tolist()


def test_the_longest_expected_are_admitted_first():
    scheduler = make_scheduler(plain(6), expected=np.array([5, 9, 7, 9, 1, 8.0]))
    scheduler.admit(4, BURST, at_once=BURST)
    assert scheduler.table.live.tolist() == [1, 2, 3, 5]
    in_order = make_scheduler(plain(6))
    in_order.admit(4, BURST, at_once=BURST)
    assert in_order.table.live.tolist() == [0, 1, 2, 3]


def test_samples_of_a_prompt_are_admitted_one_after_the_other():
    requests = [request for request in plain(3) for _ in range(6)]
    scheduler = make_scheduler(requests, expected=np.repeat([5.0, 9, 7], 6))
    scheduler.stagger()
    scheduler.admit(6, BURST, at_once=BURST)
    assert scheduler.table.live.tolist() == [0, 1, 6, 7, 12, 13]
    first, second, rest = [8, 14, 2], [9, 15, 3], [10, 11, 16, 17, 4, 5]
    assert scheduler.queue.tolist() == [*first, *second, *rest]
    scheduler.check_integrity()


def test_sequences_are_dealt_out_evenly():
    scheduler = make_scheduler(plain(9), num_groups=4)
    scheduler.admit(5, BURST, at_once=BURST)
    table = scheduler.table
    assert sorted(np.bincount(table.group(np.arange(9)), minlength=4)) == [2, 2, 2, 3]
    assert table.fullest == 3


def test_more_sequences_than_rows_wait_and_fill_the_emptiest_groups():
    scheduler = make_scheduler(plain(9), num_groups=2)
    scheduler.admit(3, BURST, at_once=BURST)
    table = scheduler.table
    assert table.live.tolist() == [0, 1, 2, 3, 4, 5] and table.load().waiting == 3
    group = table.group(np.arange(6))
    (first, second), (third,) = np.flatnonzero(group == 0)[:2], np.flatnonzero(group == 1)[:1]
    ended = np.array([first, second, third])
    burst(scheduler.contents, np.ones(6, int), ~np.isin(np.arange(6), ended), steps=1)
    scheduler.release_ended()
    assert scheduler.admit(3, BURST, at_once=BURST).spans.sequence.tolist() == [6, 7, 8]
    assert np.bincount(table.group(np.array([6, 7, 8]))).tolist() == [2, 1]
    assert sorted(table.row.tolist()) == [NO_ROW] * 3 + [*range(6)]
    assert len(scheduler.admit(3, BURST, at_once=BURST).spans.sequence) == 0
    assert table.load().step == 1


def test_samples_of_a_prompt_go_to_one_group_and_are_prefilled_once():
    requests = [request for request in plain(4, prompt=11) for _ in range(3)]
    scheduler = make_scheduler(requests, num_groups=2)
    round = scheduler.admit(6, BURST, at_once=BURST)
    group = scheduler.table.group(np.arange(12)).reshape(4, 3)
    assert (group == group[:, :1]).all() and sorted(group[:, 0]) == [0, 0, 1, 1]
    assert round.spans.sequence.tolist() == [0, 3, 6, 9]
    assert (round.spans.stop - round.spans.start).tolist() == [10] * 4
    assert len(round.copies.group) == 8


def test_rows_are_not_left_empty_for_the_sake_of_a_prefix():
    scheduler = make_scheduler([request for request in plain(1) for _ in range(6)], num_groups=2)
    scheduler.admit(4, BURST, at_once=BURST)
    assert np.bincount(scheduler.table.group(np.arange(6))).tolist() == [3, 3]


def test_the_youngest_gives_way_and_comes_back_first():
    """Prompts of one page, one page and five; the pool has 9."""
    three = zip(plain(4, prompt=18, most=12), (4, 4, 18, 4), strict=True)
    requests = [replace(request, tokens=request.tokens[:n]) for request, n in three]
    scheduler = make_scheduler(requests, num_pages=10)
    table = scheduler.table
    scheduler.admit(3, 1, at_once=1)
    assert table.live.tolist() == [0, 1, 2] and scheduler.tables.num_held == 1 + 1 + 5
    burst(scheduler.contents, np.ones(3, int), np.ones(3, bool))
    assert scheduler.grow(5, at_once=5) == 1  # two more, two more, one more; two are left
    assert table.live.tolist() == [0, 1]
    assert table.length[2] == 18 + 1  # what it said is kept
    assert scheduler.tables.num_held == 3 + 3
    # It does not fit, and 3, which would, does not overtake it.
    assert len(scheduler.admit(3, 5, at_once=5).spans.sequence) == 0
    burst(scheduler.contents, np.array([5, 5]), np.array([True, False]), steps=5)
    scheduler.release_ended()
    assert scheduler.grow(1, at_once=1) == 0
    round = scheduler.admit(2, 1, at_once=1)
    assert round.spans.sequence.tolist() == [2]  # 3 waits behind it
    assert round.spans.stop.tolist() == [18]


def test_who_is_admitted_keeps_pages_for_its_next_few_tokens():
    """There must be room for a burst of 9: four pages each, so that the third waits."""
    scheduler = make_scheduler(plain(3, prompt=5, most=20), num_pages=12)
    scheduler.admit(3, 9, at_once=2)
    assert scheduler.table.live.tolist() == [0, 1]
    assert scheduler.tables.num_held == 2 * 2 and scheduler.tables.unused == 2 * (8 - 4)
    assert scheduler.tables.lacking(4).tolist() == [0]
    assert scheduler.tables.lacking(5).tolist() == [2]
    assert scheduler.tables.lacking(1000).tolist() == [2 * (6 - 2)], "24 tokens at most"


def test_nobody_overtakes_who_needs_more_pages():
    three = zip(plain(3, prompt=17), (9, 17, 2), strict=True)
    requests = [replace(request, tokens=request.tokens[:n]) for request, n in three]
    scheduler = make_scheduler(requests, num_pages=8)
    scheduler.admit(3, BURST, at_once=BURST)
    assert scheduler.table.live.tolist() == [0]


def test_pages_that_are_shared_move_once():
    requests = [*plain(1, prompt=13)] * 3
    scheduler = make_scheduler(requests, num_groups=1, num_pages=100)
    scheduler.admit(3, BURST, at_once=BURST)
    shipments, round = carry(
        scheduler, 1, num_pages=50, is_recomputed=np.array([False, False, True]), steps=BURST
    )
    # 12 known tokens: three pages, all shared; the third sequence finds them.
    assert len(arrivals(shipments)) == 3 and len(round.spans.sequence) == 0
    assert [set(row) for row in scheduler.tables.rows(np.arange(3), 3)] == [
        set(arrivals(shipments))
    ] * 3
    assert scheduler.tables.num_held == 3 + 1  # and room for its next burst


def test_who_finds_too_few_pages_in_a_switch_waits_the_oldest_first():
    scheduler = make_scheduler(plain(5, prompt=8, most=5), num_groups=2, num_pages=100)
    scheduler.admit(2, BURST, at_once=BURST)  # the fifth waits
    shipments, _ = carry(
        scheduler, 1, num_pages=6, is_recomputed=np.array([False, True, False, True]), steps=BURST
    )
    assert scheduler.table.live.tolist() == [0, 2] and len(arrivals(shipments)) == 4
    assert (scheduler.tables.rows(np.arange(4), 2)[[1, 3]] == NULL_PAGE).all()
    assert scheduler.tables.count.max() == 2
    assert scheduler.grow(5, at_once=5) == 1, "one more each, and one is left"
    scheduler.table.end_now(np.array([0]))
    scheduler.release_ended()
    assert scheduler.admit(5, 1, at_once=1).spans.sequence.tolist() == [1]
    assert scheduler.table.live.tolist() == [1, 2], "what 2 had was still there"


@pytest.mark.parametrize("is_recomputed", [True, False])
def test_in_a_switch_the_oldest_get_their_pages_first(is_recomputed):
    scheduler = make_scheduler(plain(3, prompt=8, most=5), expected=np.array([1.0, 3.0, 2.0]))
    scheduler.admit(3, BURST, at_once=BURST)
    carry(scheduler, 1, num_pages=6, is_recomputed=np.full(3, is_recomputed), steps=1)
    assert scheduler.table.live.tolist() == [1, 2]


def test_groups_get_alike_numbers_and_pages():
    long, short = plain(2, prompt=17), plain(2, prompt=17)
    requests = [*long, *(replace(request, tokens=request.tokens[:3]) for request in short)]
    scheduler = make_scheduler(requests, num_groups=2)
    scheduler.admit(4, BURST, at_once=BURST)
    group = scheduler.table.group(np.arange(4))
    assert sorted(group[:2]) == sorted(group[2:]) == [0, 1]


def test_groups_that_merge_share_what_they_have_in_common():
    system = tuple(range(100, 108))
    requests = [Request((*system, i), np.zeros(2, np.uint32), 5) for i in range(2)]
    scheduler = make_scheduler(requests, num_groups=2, num_pages=100)
    scheduler.admit(1, BURST, at_once=BURST)
    assert scheduler.tables.num_held == 2 * 3
    shipments, _ = carry(scheduler, 1, num_pages=100, is_recomputed=np.zeros(2, bool), steps=BURST)
    groups = {int(g) for one in shipments for g in np.nonzero(one.old_page)[0]}
    assert len(arrivals(shipments)) == 2 and len(groups) == 1


def test_a_sequence_that_no_pool_holds_is_refused():
    with pytest.raises(ValueError, match="does not hold a sequence of 13 tokens"):
        make_scheduler(plain(1, prompt=5, most=9), num_pages=4)
    make_scheduler(plain(1, prompt=5, most=8), num_pages=4)


def preempted(most_pages: int, tokens: list[list[int]], prompts: list[Request]) -> Scheduler:
    """Of sequences that have said some tokens the last has given way to the others."""
    scheduler = make_scheduler(prompts, num_pages=1 + most_pages)
    table = scheduler.table
    scheduler.admit(len(prompts), 1, at_once=1)
    for said in zip(*tokens, strict=True):
        assert scheduler.grow(1, at_once=1) == 0
        ones = np.ones(len(said), int)
        burst(scheduler.contents, ones, ones > 0, np.array(said), steps=1)
    free = scheduler.tables.free[0]
    steps = next(n for n in range(1, 99) if scheduler.tables.lacking(n)[0] > free)
    assert scheduler.grow(steps, at_once=1) == 1
    assert table.waiting.tolist() == [len(prompts) - 1]
    scheduler.check_integrity()
    return scheduler


def test_who_gave_way_finds_the_pages_that_it_had_filled():
    """Prompts of 5 tokens; of 6 more each all but the newest are in the cache, in 3 pages."""
    scheduler = preempted(
        6, [[11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25, 26]], plain(2, most=20)
    )
    scheduler.table.end_now(np.array([0]))
    scheduler.release_ended()
    work = scheduler.admit(2, 1, at_once=1)
    assert scheduler.table.live.tolist() == [1]
    assert len(work.spans.sequence) == len(work.copies.group) == 0, "nothing is computed again"
    assert scheduler.tables.count[1] == 3
    scheduler.check_integrity()


def test_pages_that_others_have_needed_meanwhile_are_computed_again():
    """The elder takes one page more: that with the newest tokens of the one that gave way."""
    scheduler = preempted(
        6, [[11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25, 26]], plain(2, most=20)
    )
    assert scheduler.grow(4, at_once=4) == 0 and scheduler.tables.count[0] == 4
    scheduler.table.end_now(np.array([0]))
    scheduler.release_ended()
    work = scheduler.admit(2, 1, at_once=1)
    assert (work.spans.start.tolist(), work.spans.stop.tolist()) == ([8], [10])
    assert len(work.copies.group) == 0
    scheduler.check_integrity()


@pytest.mark.parametrize("is_same", [True, False])
def test_who_gave_way_finds_its_own_pages_behind_a_beginning_that_it_shares(is_same):
    """Two samples of a prompt of two pages, who say the same or not."""
    first, second = [31, 32, 33, 34, 35, 36], [31, 32 if is_same else 42, 33, 34, 35, 36]
    scheduler = preempted(6, [first, second], plain(1, prompt=9, most=12) * 2)
    tables, shared = scheduler.tables, scheduler.tables.of(0)[:2].tolist()
    assert tables.num_held == tables.count[0] == 4
    work = scheduler.admit(2, 1, at_once=1)
    assert scheduler.table.live.tolist() == [0, 1] and len(work.spans.sequence) == 0
    assert tables.of(1)[:2].tolist() == shared
    assert not set(tables.of(0)[2:].tolist()) & set(tables.of(1)[2:].tolist())
    scheduler.check_integrity()


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda s: s._queue.popleft(), "queue"),
        (lambda s: s.table.leave(np.array([0])), "not live holds"),
        (lambda s: s.tables.forget([0]), "no page"),
        (lambda s: s.tables.group.__setitem__(0, 1 - s.tables.group[0]), None),
        (lambda s: s.tables.give(0, 0, s.tables.of(2).copy()), "other holders"),
        (lambda s: s.tables.pools[0].take(1), "other holders"),
        (lambda s: s.tables.pools[0]._idle.popitem(), "held, idle or blank"),
    ],
    ids=["queue", "row", "pages", "group", "another's", "for nobody", "not free"],
)
def test_rows_and_pages_that_contradict_each_other_are_found(spoil, message):
    """Of seven, three in the first of two groups; one there has ended, and its pages can be found."""
    scheduler = make_scheduler(plain(7), num_groups=2, num_pages=50)
    table = scheduler.table
    scheduler.admit(3, BURST, at_once=BURST)
    assert table.group(np.arange(6)).tolist() == [0, 1, 0, 1, 0, 1]
    burst(scheduler.contents, np.ones(6, int), np.arange(6) != 4, steps=1)
    scheduler.release_ended()
    scheduler.check_integrity()
    spoil(scheduler)
    with pytest.raises(AssertionError, match=message):
        scheduler.check_integrity()
