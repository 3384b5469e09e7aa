"""Exchanges in one memory: few bytes, a bounded staging, and sequences that stay whole.

That nothing is overwritten before it left is held by `test_migration.py` and `test_serving.py`.
"""

import numpy as np
import pytest
from exchanges import Geometry, drawn
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_jax.engine.relocation import order
from pat_jax.engine.relocation.order import Placed, placed
from pat_jax.engine.relocation.rounds import ALL, MOST_EMPTY, Shipment, rounds
from pat_jax.engine.sequences.page_allocator import NULL_PAGE
from pat_jax.engine.sequences.prefill_calls import PageMoves


def check(geometry: Geometry, moves: PageMoves) -> Placed:
    """Of few bytes and with a bounded staging.

    Sequences hold four pages each, one of them with the next; where one stays behind all stay that no
    other holds.
    """
    every = np.arange(len(moves.old_page))
    holds = [every[k : k + 4] for k in every[::3]]
    result = placed(moves, holds, *geometry.pools)
    goes = result.new_page != NULL_PAGE
    kept = np.concatenate([every[:0], *(mine for mine in holds if goes[mine].all())])
    assert np.array_equal(np.unique(kept), np.flatnonzero(goes))
    sent = sum(one.round.slots(geometry.narrow.replicas) for one in result.shipments)
    assert sent <= (1 + MOST_EMPTY) * goes.sum()
    assert most_waiting(geometry, result.shipments) <= order.MOST_WAITING
    return result


def most_waiting(geometry: Geometry, shipments: list[Shipment]) -> float:
    """Pages of a replica, in rounds that have arrived and not been put; of one replica each device
    gets a part."""
    waits: dict[int, float] = {}
    most = 0.0
    for number, one in enumerate(shipments):
        is_part = geometry.is_up and one.round.replica != ALL
        waits[number] = one.round.size / (geometry.members if is_part else 1)
        for other in one.put:
            del waits[other]
        most = max(most, sum(waits.values()))
    return most


def fewest(geometry: Geometry, moves: PageMoves) -> int:
    """Rounds, if pools were two memories."""
    replica = moves.old_replica if geometry.is_up else moves.new_replica
    return len(rounds(np.bincount(replica, minlength=geometry.narrow.replicas)))


@settings(deadline=None, max_examples=150)
@given(
    st.builds(
        Geometry,
        wide_replicas=st.integers(1, 2),
        ways=st.sampled_from([1, 2, 3, 4]),
        copies=st.sampled_from([1, 2]),
        pages=st.integers(2, 60),
        is_up=st.booleans(),
    ),
    st.sampled_from([0.0, 0.3, 0.7, 0.95, 1.0]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.integers(0, 10**6),
)
def test_every_page_goes(geometry, fill, skew, seed):
    """Where TP falls, replicas hold unlike numbers of pages and heads have copies, some stay."""
    moves = drawn(geometry, np.random.default_rng(seed), fill, skew)
    goes = check(geometry, moves).new_page != NULL_PAGE
    assert goes.all() or (not geometry.is_up and skew > 0 and geometry.copies > 1)


@pytest.mark.parametrize("is_up", [True, False], ids=["up", "down"])
@pytest.mark.parametrize("most", [0, 1, 5])
def test_what_would_wait_where_it_may_not_stays_behind(monkeypatch, most, is_up):
    monkeypatch.setattr(order, "MOST_WAITING", most)
    geometry, stay = Geometry(wide_replicas=2, ways=4, copies=1, pages=60, is_up=is_up), []
    for seed in range(20):
        moves = drawn(geometry, np.random.default_rng(seed), fill=0.95, skew=0.3)
        stay.append((check(geometry, moves).new_page == NULL_PAGE).mean())
    assert 0 < np.mean(stay) < 0.5


@pytest.mark.parametrize("is_up", [True, False], ids=["up", "down"])
@pytest.mark.parametrize(
    ("ways", "pages", "fill", "skew"), [(2, 400, 1.0, 0.0), (8, 400, 1.0, 0.0), (8, 500, 0.9, 0.3)]
)
def test_a_large_pool_takes_no_more_rounds_than_two_memories(is_up, ways, pages, fill, skew):
    """Scattered pages included: free memory that eight replicas have in common is rare then."""
    geometry = Geometry(wide_replicas=1, ways=ways, copies=1, pages=pages, is_up=is_up)
    moves = drawn(geometry, np.random.default_rng(0), fill, skew)
    assert len(check(geometry, moves).shipments) == fewest(geometry, moves)
