"""The rounds of a migration: how many pages each exchange of fixed size sends. NumPy, on the host.

Pages that all replicas have move fastest in rounds of all replicas. If one replica has more pages
than the others, its remaining pages go in rounds in which no other replica sends. Large buffers
need fewer rounds, small ones send fewer empty pages. A few empty pages are sent, because another
round would cost more. `order.py` decides which page goes in which round.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pat_jax.engine.sequences.page_allocator import NULL_PAGE
from pat_jax.engine.sequences.prefill_calls import PageMoves

SIZES = (32, 1)  # pages of a staging buffer, largest first
SHIFT_SIZES = (32, 8)  # the same for moves between replicas of a layout; the largest is equal
ALL = -1
MOST_EMPTY = 0.04  # empty pages sent, as a share of the pages that move


@dataclass(frozen=True)
class Round:
    replica: int  # the replica of the layout with less TP that takes part, or ALL
    size: int  # pages that each replica sends, empty ones included

    def slots(self, num_replicas: int) -> int:
        """Returns the number of pages sent, empty ones included."""
        return self.size * (num_replicas if self.replica == ALL else 1)


def rounds(pages: np.ndarray) -> list[Round]:
    """Returns rounds that move `pages[g]` pages of each narrow replica g, int[narrow replicas].

    Rounds of all replicas come first; then the replicas with more pages take turns.
    """
    # Sending rests in large rounds uses up the empty pages, which leaves small rounds to other
    # replicas. So two ways are tried, and the one with fewer rounds wins.
    return min((_rounds(pages, least) for least in (0, SIZES[0])), key=len)


def _rounds(pages: np.ndarray, least: int) -> list[Round]:
    """A replica with at least `least` pages left sends them in large rounds of its own."""
    left = pages.astype(int)
    spare = int(MOST_EMPTY * pages.sum())
    together, alone = [], []
    for size in SIZES:
        while left.any() and (empty := int(np.maximum(size - left, 0).sum())) <= spare:
            together.append(Round(ALL, size))
            left = np.maximum(left - size, 0)
            spare = spare - empty
        turns = []
        for replica in np.argsort(-(left % size), kind="stable").tolist():
            turn = 0
            while left[replica] >= min(least, size) and left[replica]:
                empty = max(size - int(left[replica]), 0)
                if empty > spare:
                    break
                turns.append((turn, Round(replica, size)))
                left[replica] = max(left[replica] - size, 0)
                spare = spare - empty
                turn += 1
        alone += [step for _, step in sorted(turns, key=lambda one: one[0])]
    return together + alone


@dataclass(frozen=True)
class Shipment:
    """A round and its pages: the old and the new page in each slot, int[narrow replicas, size].

    An empty slot has NULL_PAGE.
    """

    round: Round
    old_page: np.ndarray
    new_page: np.ndarray
    put: tuple[int, ...]  # numbers of the rounds that are unpacked after this one is packed


@dataclass(frozen=True)
class Shift:
    """A round within one layout: the old and the new page in each slot, int[replicas, size].

    Every replica sends to the replica whose number is `distance` higher, in a ring. An empty slot
    has NULL_PAGE.
    """

    distance: int
    old_page: np.ndarray  # by the replica that sends
    new_page: np.ndarray  # by the replica that receives


def shifts(moves: PageMoves, num_replicas: int) -> Iterator[Shift]:
    """Yields the rounds that move all pages; each sends pages over one distance, see `Shift`.

    All replicas send at once. So a large buffer is used if the replica with most pages fills more
    than half of it.
    """
    large, small = SHIFT_SIZES
    distance = (moves.new_replica - moves.old_replica) % num_replicas
    for far in np.unique(distance).tolist():
        queue = [
            np.flatnonzero((distance == far) & (moves.old_replica == g))
            for g in range(num_replicas)
        ]
        while left := max(map(len, queue)):
            size = large if 2 * left > large else small
            shift = Shift(far, *np.full((2, num_replicas, size), NULL_PAGE))
            for g in range(num_replicas):
                now, queue[g] = np.split(queue[g], [size])
                shift.old_page[g, : len(now)] = moves.old_page[now]
                shift.new_page[(g + far) % num_replicas, : len(now)] = moves.new_page[now]
            yield shift
