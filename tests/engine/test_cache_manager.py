"""Scheduler by cases with a known answer, and at length."""

from dataclasses import replace

import numpy as np
import pytest
from bursts import burst, carry

from pat_jax.engine.cache_manager import CacheManager
from pat_jax.engine.relocation.rounds import Shipment
from pat_jax.engine.sequences.page_allocator import NULL_PAGE
from pat_jax.engine.sequences.responses import Request, Responses
from pat_jax.engine.sequences.sequence_table import NO_ROW

BURST = 4


def make_cache_manager(requests: list[Request], *, num_replicas=1, num_pages=1000, **options):
    responses = Responses.of(requests, num_replicas=num_replicas, rows_per_replica=1)
    return CacheManager(responses, num_pages=num_pages, page_size=4, **options)


def plain(count: int, prompt: int = 5, most: int = 9) -> list[Request]:
    """Prompts that have nothing in common."""
    rng = np.random.default_rng(1)
    return [
        Request(tuple(rng.integers(0, 10**6, prompt).tolist()), np.zeros(2, np.uint32), most)
        for _ in range(count)
    ]


def arrivals(shipments: list[Shipment]) -> list[int]:
    """Where pages arrive in the only replica there is."""
    pages = np.concatenate([one.new_page.ravel() for one in shipments])
    return pages[pages != NULL_PAGE].tolist()


def test_the_longest_expected_are_admitted_first():
    cache_manager = make_cache_manager(plain(6), expected=np.array([5, 9, 7, 9, 1, 8.0]))
    cache_manager.admit(4, BURST, at_once=BURST)
    assert cache_manager.table.running.tolist() == [1, 2, 3, 5]
    in_order = make_cache_manager(plain(6))
    in_order.admit(4, BURST, at_once=BURST)
    assert in_order.table.running.tolist() == [0, 1, 2, 3]


def test_more_sequences_than_rows_wait_and_fill_the_emptiest_groups():
    cache_manager = make_cache_manager(plain(9), num_replicas=2)
    cache_manager.admit(3, BURST, at_once=BURST)
    table = cache_manager.table
    assert table.running.tolist() == [0, 1, 2, 3, 4, 5] and table.load().waiting == 3
    replica = table.replica(np.arange(6))
    (first, second), (third,) = np.flatnonzero(replica == 0)[:2], np.flatnonzero(replica == 1)[:1]
    ended = np.array([first, second, third])
    burst(cache_manager.contents, np.ones(6, int), ~np.isin(np.arange(6), ended), steps=1)
    cache_manager.release_ended()
    assert cache_manager.admit(3, BURST, at_once=BURST).spans.sequence.tolist() == [6, 7, 8]
    assert np.bincount(table.replica(np.array([6, 7, 8]))).tolist() == [2, 1]
    assert sorted(table.row.tolist()) == [NO_ROW] * 3 + [*range(6)]
    assert len(cache_manager.admit(3, BURST, at_once=BURST).spans.sequence) == 0
    assert table.load().step == 1


def test_samples_of_a_prompt_go_to_one_group_and_are_prefilled_once():
    requests = [request for request in plain(4, prompt=11) for _ in range(3)]
    cache_manager = make_cache_manager(requests, num_replicas=2)
    round = cache_manager.admit(6, BURST, at_once=BURST)
    replica = cache_manager.table.replica(np.arange(12)).reshape(4, 3)
    assert (replica == replica[:, :1]).all() and sorted(replica[:, 0]) == [0, 0, 1, 1]
    assert round.spans.sequence.tolist() == [0, 3, 6, 9]
    assert (round.spans.stop - round.spans.start).tolist() == [10] * 4
    assert len(round.copies.replica) == 8


def test_rows_are_not_left_empty_for_the_sake_of_a_prefix():
    cache_manager = make_cache_manager(
        [request for request in plain(1) for _ in range(6)], num_replicas=2
    )
    cache_manager.admit(4, BURST, at_once=BURST)
    assert np.bincount(cache_manager.table.replica(np.arange(6))).tolist() == [3, 3]


def test_the_youngest_gives_way_and_comes_back_first():
    """Prompts of one page, one page and five; the pool has 9."""
    three = zip(plain(4, prompt=18, most=12), (4, 4, 18, 4), strict=True)
    requests = [replace(request, tokens=request.tokens[:n]) for request, n in three]
    cache_manager = make_cache_manager(requests, num_pages=10)
    table = cache_manager.table
    cache_manager.admit(3, 1, at_once=1)
    assert table.running.tolist() == [0, 1, 2] and cache_manager.tables.num_held == 1 + 1 + 5
    burst(cache_manager.contents, np.ones(3, int), np.ones(3, bool))
    assert cache_manager.grow(5, at_once=5) == 1  # two more, two more, one more; two are left
    assert table.running.tolist() == [0, 1]
    assert table.length[2] == 18 + 1  # what it said is kept
    assert cache_manager.tables.num_held == 3 + 3
    # It does not fit, and 3, which would, does not overtake it.
    assert len(cache_manager.admit(3, 5, at_once=5).spans.sequence) == 0
    burst(cache_manager.contents, np.array([5, 5]), np.array([True, False]), steps=5)
    cache_manager.release_ended()
    assert cache_manager.grow(1, at_once=1) == 0
    round = cache_manager.admit(2, 1, at_once=1)
    assert round.spans.sequence.tolist() == [2]  # 3 waits behind it
    assert round.spans.stop.tolist() == [18]


def test_pages_that_are_shared_move_once():
    requests = [*plain(1, prompt=13)] * 3
    cache_manager = make_cache_manager(requests, num_replicas=1, num_pages=100)
    cache_manager.admit(3, BURST, at_once=BURST)
    shipments, round = carry(
        cache_manager, 1, num_pages=50, is_recomputed=np.array([False, False, True]), steps=BURST
    )
    # 12 known tokens: three pages, all shared; the third sequence finds them.
    assert len(arrivals(shipments)) == 3 and len(round.spans.sequence) == 0
    assert [set(row) for row in cache_manager.tables.rows(np.arange(3), 3)] == [
        set(arrivals(shipments))
    ] * 3
    assert cache_manager.tables.num_held == 3 + 1  # and room for its next burst


def test_who_finds_too_few_pages_in_a_switch_waits_the_oldest_first():
    cache_manager = make_cache_manager(plain(5, prompt=8, most=5), num_replicas=2, num_pages=100)
    cache_manager.admit(2, BURST, at_once=BURST)  # the fifth waits
    shipments, _ = carry(
        cache_manager,
        1,
        num_pages=6,
        is_recomputed=np.array([False, True, False, True]),
        steps=BURST,
    )
    assert cache_manager.table.running.tolist() == [0, 2] and len(arrivals(shipments)) == 4
    assert (cache_manager.tables.rows(np.arange(4), 2)[[1, 3]] == NULL_PAGE).all()
    assert cache_manager.tables.count.max() == 2
    assert cache_manager.grow(5, at_once=5) == 1, "one more each, and one is left"
    cache_manager.table.end_now(np.array([0]))
    cache_manager.release_ended()
    assert cache_manager.admit(5, 1, at_once=1).spans.sequence.tolist() == [1]
    assert cache_manager.table.running.tolist() == [1, 2], "what 2 had was still there"


@pytest.mark.parametrize("is_recomputed", [True, False])
def test_in_a_switch_the_oldest_get_their_pages_first(is_recomputed):
    cache_manager = make_cache_manager(
        plain(3, prompt=8, most=5), expected=np.array([1.0, 3.0, 2.0])
    )
    cache_manager.admit(3, BURST, at_once=BURST)
    carry(cache_manager, 1, num_pages=6, is_recomputed=np.full(3, is_recomputed), steps=1)
    assert cache_manager.table.running.tolist() == [1, 2]


def test_groups_get_alike_numbers_and_pages():
    long, short = plain(2, prompt=17), plain(2, prompt=17)
    requests = [*long, *(replace(request, tokens=request.tokens[:3]) for request in short)]
    cache_manager = make_cache_manager(requests, num_replicas=2)
    cache_manager.admit(4, BURST, at_once=BURST)
    replica = cache_manager.table.replica(np.arange(4))
    assert sorted(replica[:2]) == sorted(replica[2:]) == [0, 1]


def test_groups_that_merge_share_what_they_have_in_common():
    system = tuple(range(100, 108))
    requests = [Request((*system, i), np.zeros(2, np.uint32), 5) for i in range(2)]
    cache_manager = make_cache_manager(requests, num_replicas=2, num_pages=100)
    cache_manager.admit(1, BURST, at_once=BURST)
    assert cache_manager.tables.num_held == 2 * 3
    shipments, _ = carry(
        cache_manager, 1, num_pages=100, is_recomputed=np.zeros(2, bool), steps=BURST
    )
    replicas = {int(g) for one in shipments for g in np.nonzero(one.old_page)[0]}
    assert len(arrivals(shipments)) == 2 and len(replicas) == 1


def preempted(most_pages: int, tokens: list[list[int]], prompts: list[Request]) -> CacheManager:
    """Of sequences that have said some tokens the last has given way to the others."""
    cache_manager = make_cache_manager(prompts, num_pages=1 + most_pages)
    table = cache_manager.table
    cache_manager.admit(len(prompts), 1, at_once=1)
    for generated in zip(*tokens, strict=True):
        assert cache_manager.grow(1, at_once=1) == 0
        ones = np.ones(len(generated), int)
        burst(cache_manager.contents, ones, ones > 0, np.array(generated), steps=1)
    free = cache_manager.tables.free[0]
    steps = next(n for n in range(1, 99) if cache_manager.tables.lacking(n)[0] > free)
    assert cache_manager.grow(steps, at_once=1) == 1
    assert table.waiting.tolist() == [len(prompts) - 1]
    cache_manager.check_integrity()
    return cache_manager


def test_who_gave_way_finds_the_pages_that_it_had_filled():
    """Prompts of 5 tokens; of 6 more each all but the newest are in the cache, in 3 pages."""
    cache_manager = preempted(
        6, [[11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25, 26]], plain(2, most=20)
    )
    cache_manager.table.end_now(np.array([0]))
    cache_manager.release_ended()
    work = cache_manager.admit(2, 1, at_once=1)
    assert cache_manager.table.running.tolist() == [1]
    assert len(work.spans.sequence) == len(work.copies.replica) == 0, "nothing is computed again"
    assert cache_manager.tables.count[1] == 3
    cache_manager.check_integrity()


def test_pages_that_others_have_needed_meanwhile_are_computed_again():
    """The elder takes one page more: that with the newest tokens of the one that gave way."""
    cache_manager = preempted(
        6, [[11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25, 26]], plain(2, most=20)
    )
    assert cache_manager.grow(4, at_once=4) == 0 and cache_manager.tables.count[0] == 4
    cache_manager.table.end_now(np.array([0]))
    cache_manager.release_ended()
    work = cache_manager.admit(2, 1, at_once=1)
    assert (work.spans.start.tolist(), work.spans.stop.tolist()) == ([8], [10])
    assert len(work.copies.replica) == 0
    cache_manager.check_integrity()


@pytest.mark.parametrize("is_same", [True, False])
def test_who_gave_way_finds_its_own_pages_behind_a_beginning_that_it_shares(is_same):
    """Two samples of a prompt of two pages, who say the same or not."""
    first, second = [31, 32, 33, 34, 35, 36], [31, 32 if is_same else 42, 33, 34, 35, 36]
    cache_manager = preempted(6, [first, second], plain(1, prompt=9, most=12) * 2)
    tables, shared = cache_manager.tables, cache_manager.tables.of(0)[:2].tolist()
    assert tables.num_held == tables.count[0] == 4
    work = cache_manager.admit(2, 1, at_once=1)
    assert cache_manager.table.running.tolist() == [0, 1] and len(work.spans.sequence) == 0
    assert tables.of(1)[:2].tolist() == shared
    assert not set(tables.of(0)[2:].tolist()) & set(tables.of(1)[2:].tolist())
    cache_manager.check_integrity()
