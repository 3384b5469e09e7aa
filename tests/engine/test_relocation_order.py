"""Exchanges in one memory, replayed cell by cell: what is packed is what was there at the beginning."""

import numpy as np
import pytest
from exchanges import Geometry, drawn
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_jax.engine.relocation.order import MOST_WAITING, Placed, even_order, placed
from pat_jax.engine.relocation.rounds import MOST_EMPTY, SIZES, rounds
from pat_jax.engine.sequences.page_allocator import NULL_PAGE
from pat_jax.engine.sequences.prefill_calls import PageMoves


def copied(moves: PageMoves, result: Placed) -> PageMoves:
    """The moves after the copies, which overwrite nothing that leaves."""
    copies = zip(*(x.tolist() for x in result.copies), strict=True)
    number = {(group, source): target for group, source, target in copies}
    at = list(zip(moves.old_group.tolist(), moves.old_page.tolist(), strict=True))
    targets = {(group, target) for (group, _), target in number.items()}
    assert number.keys() <= set(at) and not targets & {*at, *((g, NULL_PAGE) for g, _ in at)}
    assert len(targets) == len(number)
    return moves._replace(old_page=np.array([number.get(one, one[1]) for one in at], int))


def replay(geometry: Geometry, moves: PageMoves, result: Placed) -> None:
    """Copies, packs, waits and puts as the devices do."""
    moves, (old, new) = copied(moves, result), geometry.pools
    memory = {
        cell: (group, page)
        for group, page in zip(moves.old_group.tolist(), moves.old_page.tolist(), strict=True)
        for cell in geometry.cells(old, group, page)
    }
    waiting: list[list] = []
    arrived = []
    for shipment in result.shipments:
        waiting.append([])
        by_group = zip(shipment.old_page, shipment.new_page, strict=True)
        for narrow_group, slots in enumerate(by_group):
            leaves, arrives = narrow_group, narrow_group % geometry.wide_groups
            if not geometry.is_up:
                leaves, arrives = arrives, leaves
            for page, place in zip(*(x.tolist() for x in slots), strict=True):
                assert (page == NULL_PAGE) == (place == NULL_PAGE)
                if page != NULL_PAGE:
                    assert all(
                        memory[cell] == (leaves, page) for cell in geometry.cells(old, leaves, page)
                    )
                    waiting[-1].append((leaves, page, arrives, place))
        for number in shipment.put:
            for move in waiting[number]:
                arrived.append(move)
                memory |= dict.fromkeys(geometry.cells(new, *move[2:]), ("new", move))
    expected = zip(moves.old_group, moves.old_page, moves.new_group, result.new_page, strict=True)
    assert sorted(arrived) == sorted(tuple(map(int, move)) for move in expected)
    assert len({move[2:] for move in arrived}) == len(arrived)
    for move in arrived:
        assert all(memory[cell] == ("new", move) for cell in geometry.cells(new, *move[2:]))


def check(geometry: Geometry, moves: PageMoves) -> Placed:
    """Sound, of few bytes and with a bounded staging."""
    result = placed(moves, *geometry.pools)
    replay(geometry, moves, result)
    sent = sum(one.round.slots(geometry.narrow.groups) for one in result.shipments)
    assert sent <= (1 + MOST_EMPTY) * len(moves.old_page)
    assert result.most_waiting <= MOST_WAITING
    return result


def fewest(geometry: Geometry, moves: PageMoves) -> int:
    """Rounds, if pools were two memories."""
    group = moves.old_group if geometry.is_up else moves.new_group
    return len(rounds(np.bincount(group, minlength=geometry.narrow.groups)))


@settings(deadline=None, max_examples=150)
@given(
    st.builds(
        Geometry,
        wide_groups=st.integers(1, 2),
        ways=st.sampled_from([1, 2, 3, 4]),
        copies=st.sampled_from([1, 2]),
        pages=st.integers(2, 60),
        is_up=st.booleans(),
    ),
    st.sampled_from([0.0, 0.3, 0.7, 0.95, 1.0]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.integers(0, 10**6),
)
def test_every_page_arrives_and_none_is_overwritten_before_it_left(geometry, fill, skew, seed):
    moves = drawn(geometry, np.random.default_rng(seed), fill, skew)
    check(geometry, moves)


@pytest.mark.parametrize("is_up", [True, False], ids=["up", "down"])
@pytest.mark.parametrize("fill", [0.6, 0.95, 1.0])
@pytest.mark.parametrize("ways", [2, 8])
def test_a_large_pool_takes_no_more_rounds_than_two_memories(is_up, fill, ways):
    geometry = Geometry(wide_groups=1, ways=ways, copies=1, pages=400, is_up=is_up)
    moves = drawn(geometry, np.random.default_rng(ways), fill, skew=0.0)
    most = np.bincount(moves.old_group if is_up else moves.new_group).max()
    result = check(geometry, moves)
    assert len(result.shipments) == fewest(geometry, moves) <= -(-most // SIZES[0]) + SIZES[0]


@pytest.mark.parametrize("is_up", [True, False], ids=["up", "down"])
@pytest.mark.parametrize("fill", [0.3, 0.6, 0.9])
def test_a_large_pool_of_scattered_pages_takes_few_rounds(is_up, fill):
    """Free memory that eight groups have in common is rare where each has its pages anywhere."""
    geometry = Geometry(wide_groups=1, ways=8, copies=1, pages=500, is_up=is_up)
    moves = drawn(geometry, np.random.default_rng(0), fill, skew=0.3)
    assert len(check(geometry, moves).shipments) == fewest(geometry, moves)


@pytest.mark.parametrize("skew", [0.3, 1.0])
def test_pages_scattered_over_a_large_pool_are_copied_together_first(skew):
    """No run of pages that eight groups have free is long enough to take what arrives."""
    geometry = Geometry(wide_groups=1, ways=8, copies=1, pages=2000, is_up=True)
    moves = drawn(geometry, np.random.default_rng(0), fill=0.9, skew=skew)
    result = check(geometry, moves)
    assert len(result.copies[0]) > 2000
    assert len(result.shipments) == fewest(geometry, moves)


def blocks_of(count: list[list[int]], geometry: Geometry) -> PageMoves:
    """Going down from a full pool; `count` pages of each block go to each of the members."""
    moves, page = [], NULL_PAGE
    for block in count:
        for member, pages in enumerate(block):
            for _ in range(pages):
                page += 1
                moves.append((0, page, member, NULL_PAGE))
    return PageMoves(*np.array(moves, np.int64).reshape(-1, 4).T)


def test_blocks_of_one_group_and_of_two_are_emptied_by_turns():
    """Page by page each group empties its own kind of block first, and those of two come last."""
    n = 100
    geometry = Geometry(wide_groups=1, ways=2, copies=1, pages=4 * n + 1, is_up=False)
    # Page 1 shares its memory with the null page, and so all are one off.
    moves = blocks_of(
        [[1, 0], *[[0, 2]] * n, *[[1, 1]] * (2 * n), *[[2, 0]] * (n - 1), [1, 0]], geometry
    )
    result = check(geometry, moves)
    assert np.bincount(moves.new_group).max() == geometry.narrow.pages - 1
    assert len(result.shipments) == fewest(geometry, moves)


def test_what_most_groups_have_more_goes_page_by_page_where_large_rounds_do_not_fit():
    """Five of eight groups have 64 pages more than the others: two large rounds each."""
    rng = np.random.default_rng(82)
    group = rng.permutation(np.repeat(np.arange(8), [332] * 5 + [268] * 3))
    geometry = Geometry(wide_groups=1, ways=8, copies=1, pages=334, is_up=False)
    moves = PageMoves(0 * group, 1 + np.arange(len(group)), group, 0 * group)
    result = check(geometry, moves)
    assert {shipment.round.size for shipment in result.shipments} == {SIZES[-1]}


@given(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=200))
def test_every_beginning_of_an_even_order_has_its_share(blocks):
    count = np.array([block for block in blocks if sum(block)] or [[1, 1, 1]])
    path = np.stack([0 * count.sum(axis=0), count.sum(axis=0)]).astype(float)
    order = even_order(count, path)
    assert sorted(order.tolist()) == list(range(len(count)))
    sent = np.cumsum(count[order], axis=0)
    share = sent.sum(axis=1, keepdims=True) * path[-1] / path[-1].sum()
    assert np.abs(sent - share).max() <= 3 * 3  # dimension times the longest
