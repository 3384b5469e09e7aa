"""The rounds of a migration: how many pages go in which fixed-size exchange. NumPy, on the host.

A round in which all replicas take part is the fastest way to move pages that all of them have. What
one replica has more than the others goes in rounds of its own, in which no other one sends. A large
buffer needs fewer rounds, a small one sends fewer empty pages. Empty pages are sent as long as they
are few, since a round costs more than they do. `order.py` says which page goes in which round.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pat_jax.engine.sequences.page_allocator import NULL_PAGE
from pat_jax.engine.sequences.prefill_calls import PageMoves

SIZES = (32, 1)  # pages of a staging buffer, largest first
SHIFT_SIZES = (32, 8)  # the same, between replicas of one layout; the largest is the same
ALL = -1
MOST_EMPTY = 0.04  # of the pages that have to move


@dataclass(frozen=True)
class Round:
    replica: int  # the narrow replica that takes part, or ALL
    size: int  # pages of a replica

    def slots(self, num_replicas: int) -> int:
        """Pages that are sent, empty ones included."""
        return self.size * (num_replicas if self.replica == ALL else 1)


def rounds(pages: np.ndarray) -> list[Round]:
    """Rounds that move `pages`, int[narrow replicas]; at most `MOST_EMPTY` more are sent than that.

    Those of all replicas come first; then the replicas that have more take turns.
    """
    # A replica that sends its rest alone, and some empty pages, leaves small rounds to others like
    # it.
    return min((_rounds(pages, least) for least in (0, SIZES[0])), key=len)


def _rounds(pages: np.ndarray, least: int) -> list[Round]:
    """A replica sends in a large round of its own what it has left, if that is at least `least`."""
    left, spare = pages.astype(int), int(MOST_EMPTY * pages.sum())
    together, alone = [], []
    for size in SIZES:
        while left.any() and (empty := int(np.maximum(size - left, 0).sum())) <= spare:
            together.append(Round(ALL, size))
            left, spare = np.maximum(left - size, 0), spare - empty
        turns = []
        for replica in np.argsort(-(left % size), kind="stable").tolist():
            turn = 0
            while left[replica] >= min(least, size) and left[replica]:
                empty = max(size - int(left[replica]), 0)
                if empty > spare:
                    break
                turns.append((turn, Round(replica, size)))
                left[replica], spare = max(left[replica] - size, 0), spare - empty
                turn += 1
        alone += [step for _, step in sorted(turns, key=lambda one: one[0])]
    return together + alone


@dataclass(frozen=True)
class Shipment:
    """What one round carries: int[narrow replicas, size] each; an empty slot has NULL_PAGE."""

    round: Round
    old_page: np.ndarray
    new_page: np.ndarray
    put: tuple[int, ...]  # numbers of the rounds, itself or earlier ones, that are then unpacked


@dataclass(frozen=True)
class Shift:
    """What one round between the replicas of a layout carries: int[replicas, size] each.

    Every replica sends to the one `distance` further on. An empty slot has NULL_PAGE.
    """

    distance: int
    old_page: np.ndarray  # by the replica that it leaves
    new_page: np.ndarray  # by the replica in which it arrives


def shifts(moves: PageMoves, num_replicas: int) -> Iterator[Shift]:
    """Every page in one round, those that go equally far together.

    All replicas send at once, so what counts is the one that has most to send: it fills its large
    buffers by half at least.
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
