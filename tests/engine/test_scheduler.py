"""Scheduler by cases with a known answer, and at length."""

from dataclasses import replace

import numpy as np
import pytest
from bursts import burst

from pat_jax.engine.relocation.rounds import Shipment
from pat_jax.engine.scheduler import Scheduler
from pat_jax.engine.sequences.accounts import NO_ROW
from pat_jax.engine.sequences.page_allocator import NULL_PAGE
from pat_jax.engine.sequences.page_reserve import PageReserve
from pat_jax.engine.sequences.sequence_table import Request, SequenceTable

BURST = 4


def make_scheduler(requests: list[Request], *, num_groups=1, num_pages=1000, **options):
    table = SequenceTable(requests, num_groups=num_groups, rows_per_group=1)
    return Scheduler(table, num_pages=num_pages, page_size=4, **options)


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
    assert table.live.tolist() == [0, 1, 2] and scheduler.pages_held == 1 + 1 + 5
    burst(table, np.ones(3, int), np.ones(3, bool))
    assert scheduler.grow(5, at_once=5) == 1  # two more, two more, one more; two are left
    assert table.live.tolist() == [0, 1]
    assert table.length[2] == 18 + 1  # what it said is kept
    assert scheduler.pages_held == 3 + 3
    # It does not fit, and 3, which would, does not overtake it.
    assert len(scheduler.admit(3, 5, at_once=5).spans.sequence) == 0
    burst(table, np.array([5, 5]), np.array([True, False]), steps=5)
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
    assert scheduler.pages_held == 2 * 2 and scheduler.unused == 2 * (8 - 4)
    assert scheduler.lacking(4).tolist() == [0]
    assert scheduler.lacking(5).tolist() == [2]
    assert scheduler.lacking(1000).tolist() == [2 * (6 - 2)], "24 tokens at most"


def test_what_rows_drew_is_theirs_unless_they_were_ended_meanwhile():
    scheduler = make_scheduler(plain(3, prompt=5, most=20), num_groups=2, num_pages=9)
    table = scheduler.table
    scheduler.admit(2, 4, at_once=4)
    reserve = PageReserve(scheduler.pools, size=8)
    reserve.fill(np.array([8, 4]))
    first, second = reserve.laid_out().pages
    assert reserve.left.tolist() == [8 - 2 * 2, 4], "no more than there are"
    rows = table.row.copy()
    pages = np.full((4, 3), NULL_PAGE, np.int32)
    group = table.group(np.arange(3))
    assert group.tolist().count(0) == 2
    (alone,), (one, ended) = np.flatnonzero(group == 1), np.flatnonzero(group == 0)
    pages[rows[one], :2], pages[rows[ended], :1] = first[:2], first[2:3]
    pages[rows[alone], :1] = second[:1]
    table.end_now(np.array([ended]))
    scheduler.release_ended()
    drawn = scheduler.add(pages)
    assert drawn.tolist() == [3, 1]
    reserve.note_drawn(drawn)
    reserve.take_back()
    assert scheduler.block_tables(np.array([one]), 5)[0, 2:4].tolist() == first[:2].tolist()
    assert scheduler.pages_held == (2 + 2) + (2 + 1)
    assert [pool.num_free for pool in scheduler.pools] == [8 - 4, 8 - 3]


def test_who_turns_out_to_be_done_is_not_admitted():
    scheduler = make_scheduler(plain(3))
    scheduler.table.is_done[1] = True
    assert scheduler.admit(3, BURST, at_once=BURST).spans.sequence.tolist() == [0, 2]


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
    _, shipments, round = scheduler.carry(
        1, num_pages=50, is_recomputed=np.array([False, False, True]), steps=BURST
    )
    # 12 known tokens: three pages, all shared; the third sequence finds them.
    assert len(arrivals(shipments)) == 3 and len(round.spans.sequence) == 0
    assert [set(row) for row in scheduler.block_tables(np.arange(3), 3)] == [
        set(arrivals(shipments))
    ] * 3
    assert scheduler.pages_held == 3 + 1  # and room for its next burst


def test_who_finds_too_few_pages_in_a_switch_waits_the_oldest_first():
    scheduler = make_scheduler(plain(5, prompt=8, most=5), num_groups=2, num_pages=100)
    scheduler.admit(2, BURST, at_once=BURST)  # the fifth waits
    _, shipments, _ = scheduler.carry(
        1, num_pages=6, is_recomputed=np.array([False, True, False, True]), steps=BURST
    )
    assert scheduler.table.live.tolist() == [0, 2] and len(arrivals(shipments)) == 4
    assert (scheduler.block_tables(np.arange(4), 2)[[1, 3]] == NULL_PAGE).all()
    assert scheduler.most_pages == 2
    assert scheduler.grow(5, at_once=5) == 1, "one more each, and one is left"
    scheduler.table.is_done[0], scheduler.table.row[0] = True, NO_ROW
    scheduler.release_ended()
    assert scheduler.admit(5, 1, at_once=1).spans.sequence.tolist() == [1]
    assert scheduler.table.live.tolist() == [1, 2], "what 2 had was still there"


@pytest.mark.parametrize("is_recomputed", [True, False])
def test_in_a_switch_the_oldest_get_their_pages_first(is_recomputed):
    scheduler = make_scheduler(plain(3, prompt=8, most=5), expected=np.array([1.0, 3.0, 2.0]))
    scheduler.admit(3, BURST, at_once=BURST)
    scheduler.carry(1, num_pages=6, is_recomputed=np.full(3, is_recomputed), steps=1)
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
    assert scheduler.pages_held == 2 * 3
    _, shipments, _ = scheduler.carry(
        1, num_pages=100, is_recomputed=np.zeros(2, bool), steps=BURST
    )
    groups = {int(g) for one in shipments for g in np.nonzero(one.old_page)[0]}
    assert len(arrivals(shipments)) == 2 and len(groups) == 1


def test_a_sequence_that_no_pool_holds_is_refused():
    with pytest.raises(ValueError, match="does not hold a sequence of 13 tokens"):
        make_scheduler(plain(1, prompt=5, most=9), num_pages=4)
    make_scheduler(plain(1, prompt=5, most=8), num_pages=4)


def test_ten_thousand_through_a_pool_that_holds_a_hundred():
    """Each ends once, with its own tokens; few pages are held beyond what is filled."""
    rng = np.random.default_rng(0)
    response = np.clip(rng.lognormal(4, 1, 10_000).astype(int), 1, 400)
    prompts = [tuple(rng.integers(0, 10**6, n).tolist()) for n in rng.integers(10, 60, 2500)]
    requests = [Request(prompts[i // 4], np.zeros(2, np.uint32), 400) for i in range(10_000)]
    table = SequenceTable(requests, num_groups=2, rows_per_group=1)
    total = sum(len(request.tokens) for request in requests) + int(response.sum())
    num_pages = 1 + total // 100 // 16 // 2
    scheduler = Scheduler(table, num_pages=num_pages, page_size=16)
    times_ended = np.zeros(10_000, int)
    num_preempted, prefilled, held, filled = 0, 0, 0, 0
    while table.has_work:
        num_preempted += scheduler.grow(16, at_once=16)
        round = scheduler.admit(64, 16, at_once=16)
        prefilled += int((round.spans.stop - round.spans.start).sum())
        live = table.live
        assert len(live) and (np.bincount(table.group(live)) <= 64).all()
        ahead = np.minimum(table.length[live] - 1 + 16, table.end[live] - 1)
        np.testing.assert_array_equal(scheduler._num_pages[live], -(-ahead // 16))
        held += scheduler._num_pages[live].sum() * 16
        filled += (table.length[live] - 1).sum()
        left = response[live] - (table.length[live] - table.prompt_length[live])
        burst(table, np.minimum(left, 16), left > 16, tokens=live, steps=16)
        times_ended[live[table.is_done[live]]] += 1
        scheduler.release_ended()
        assert sum(pool.num_free for pool in scheduler.pools) <= 2 * (num_pages - 1)
    assert (times_ended == 1).all() and scheduler.pages_held == 0
    for i, done in enumerate(table.completions(eos_ids=())):
        assert len(done.tokens) == response[i] and (done.tokens == i).all()
    assert num_preempted > 0
    # What was given up is computed again; the four samples of a prompt share it mostly.
    assert prefilled < 0.6 * sum(len(request.tokens) for request in requests)
    assert (held - filled) / held < 0.2
