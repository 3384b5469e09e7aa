"""In which order pages leave in a switch, and where they arrive: old and new pools are one memory.

A round packs its pages before any of them is unpacked, so that they make room for each other. One
whose pages find no room waits in the buffers in which it arrived, until later ones have been packed:
a pool may be full to its last page. Where free memory lies scattered, what leaves is copied together
first. NumPy, on the host.

One order, and recomputing what finds no room in it, would save the other two, which 0.6 % of switches
need. It would cost 0.01 % of a rollout in the mean over switches, and 3.5 % of a short one at worst
(`python -m benchmarks.relocation_order`).

Groups share devices with those congruent modulo the fewer groups; see `SequenceTable.regroup`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pat_jax.engine.relocation.rounds import ALL, SIZES, Round, Shipment, rounds
from pat_jax.engine.sequences.page_allocator import NULL_PAGE
from pat_jax.engine.sequences.prefill_calls import Copies, PageMoves

NOBODY = -1
MOST_WAITING = 2 * SIZES[0]  # pages of a group, in rounds that wait: the buffers of the two largest
CANDIDATES = 128  # blocks that are compared for the next place in an even order
GOLDEN = (5**0.5 - 1) / 2
NO_COPIES = Copies(*np.zeros((3, 0), np.int32))
# `is_even` and `sizes` of `placed_by`, each slower than the one before: a page alone waits for no other.
TRIES = ((False, SIZES), (True, SIZES), (True, SIZES[-1:]))


class Pools(NamedTuple):
    """Of a layout: the bytes of a device are the same in each."""

    groups: int
    pages: int  # of each group, NULL_PAGE among them


@dataclass(frozen=True)
class Placed:
    """Every page that moves, in one round and at one place."""

    copies: Copies  # in the old pools, before all else; rounds send the copies
    new_page: np.ndarray  # int[moves]
    shipments: list[Shipment]
    most_waiting: float  # pages of a group, as `MOST_WAITING` counts them


def placed(moves: PageMoves, old: Pools, new: Pools) -> Placed:
    """Where and when pages arrive: by the first of `TRIES` in which no more than `MOST_WAITING` wait.

    More wait, as few as in any of them, where all fail: that takes full pools of groups that hold very
    unlike shares.

    Args:
      moves: one for each page that arrives, to as many as the pools of the new groups hold;
        `new_page` is not looked at.
    """
    found = []
    for way in TRIES:
        found.append(placed_by(moves, old, new, *way))
        if found[-1].most_waiting <= MOST_WAITING:
            return found[-1]
    return min(found, key=lambda one: one.most_waiting)


def placed_by(
    moves: PageMoves, old: Pools, new: Pools, is_even: bool, sizes: tuple[int, ...]
) -> Placed:
    """As `placed`, in one order, however many wait.

    Args:
      is_even: pages are copied together first, then leave by whole blocks of memory, each round's share
        of each group in each block. Else they leave page by page, from the last to the first.
      sizes: pages of a round.
    """
    copies = NO_COPIES
    if is_even:
        copies, moves = together(moves, old)
    leaving = _Leaving(moves, old, new)
    plan = leaving.rounds(sizes)
    turn = leaving.even_turn(plan) if is_even else -leaving.block
    slots = list(leaving.slots(plan, turn))
    room, new_page = _Room(moves, old, new), np.full(len(turn), NULL_PAGE)
    waiting: dict[int, np.ndarray] = {}  # moves of rounds, which are numbered
    puts, most_waiting = [], 0.0
    for number, mine in enumerate(slots):
        waiting[number] = mine[mine != NOBODY]
        room.leave(waiting[number])
        puts.append([])
        for other in list(waiting):
            sent = waiting[other]
            if (places := room.take(moves.new_group[sent])) is not None:
                new_page[sent] = places
                del waiting[other]
                puts[-1].append(other)
        most_waiting = max(most_waiting, sum(leaving.waiting(plan[one]) for one in waiting))
    assert not waiting, "the pools hold all that arrives"
    shipments = [
        Shipment(step, _pages(mine, moves.old_page), _pages(mine, new_page), tuple(put))
        for step, mine, put in zip(plan, slots, puts, strict=True)
    ]
    return Placed(copies, new_page, shipments, most_waiting)


def together(moves: PageMoves, old: Pools) -> tuple[Copies, PageMoves]:
    """Copies after which the pages that leave are the first ones of their group, and the moves then."""
    number, copies = np.tile(np.arange(old.pages), (old.groups, 1)), []
    for group in range(old.groups):
        held = np.unique(moves.old_page[moves.old_group == group])
        beyond = held[held > len(held)]
        holes = np.setdiff1d(np.arange(NULL_PAGE + 1, len(held) + 1), held)
        number[group, beyond] = holes
        copies.append(np.stack([np.full(len(beyond), group), beyond, holes]))
    old_page = number[moves.old_group, moves.old_page]
    return Copies(*np.hstack(copies).astype(np.int32)), moves._replace(old_page=old_page)


class _Leaving:
    """The moves by narrow group: that is who takes part in a round."""

    def __init__(self, moves: PageMoves, old: Pools, new: Pools):
        self.is_up = old.groups >= new.groups
        self.group = moves.old_group if self.is_up else moves.new_group
        self.num_groups, self.num_wide = max(old.groups, new.groups), min(old.groups, new.groups)
        self.num_members = self.num_groups // self.num_wide
        # A block is a page of the narrow layout, or all that lies in its memory.
        self.block = moves.old_page * min(old.pages, new.pages) // old.pages

    @property
    def pages(self) -> np.ndarray:
        return np.bincount(self.group, minlength=self.num_groups)

    def rounds(self, sizes: tuple[int, ...]) -> list[Round]:
        """What some groups have more than others goes while it takes little memory of the others.

        Going up that is at the beginning: all devices get a part of what one of them loses. Going
        down it is at the end.
        """
        plan = rounds(self.pages, sizes)
        return plan[::-1] if self.is_up else plan

    def slots(self, plan: Sequence[Round], turn: np.ndarray) -> Iterator[np.ndarray]:
        """Which move each slot of each round has, int[narrow groups, size]; those first in turn first."""
        queue = [np.flatnonzero(self.group == g) for g in range(self.num_groups)]
        queue = [mine[np.argsort(turn[mine], kind="stable")] for mine in queue]
        for step in plan:
            slots = np.full((self.num_groups, step.size), NOBODY)
            for g in range(self.num_groups) if step.group == ALL else (step.group,):
                now, queue[g] = np.split(queue[g], [step.size])
                slots[g, : len(now)] = now
            yield slots

    def even_turn(self, plan: Sequence[Round]) -> np.ndarray:
        """A turn for each move, int[moves]: whole blocks, each round's share of each group in each."""
        sent, left = np.zeros((len(plan) + 1, self.num_groups)), self.pages
        for k, step in enumerate(plan):
            takes_part = (np.arange(self.num_groups) == step.group) | (step.group == ALL)
            sent[k + 1] = np.where(takes_part, np.minimum(left, step.size), 0)
            left = left - sent[k + 1]
        turn = np.zeros(len(self.group), np.int64)
        for wide in range(self.num_wide):
            mine = self.group % self.num_wide == wide
            blocks, block = np.unique(self.block[mine], return_inverse=True)
            count = np.zeros((len(blocks), self.num_members), np.int64)
            np.add.at(count, (block, self.group[mine] // self.num_wide), 1)
            path = np.cumsum(sent[:, wide :: self.num_wide], axis=0)
            turn[mine] = np.argsort(even_order(count, path))[block]
        return turn

    def waiting(self, step: Round) -> float:
        """What a round takes of a device's memory while it waits, in pages of the largest rounds."""
        is_part = self.is_up and step.group != ALL
        return step.size / self.num_members if is_part else step.size


def even_order(count: np.ndarray, path: np.ndarray) -> np.ndarray:
    """Blocks in an order in which every beginning has about the pages that rounds have sent so far.

    Greedily, the block after which least is wrong; vectors that add up to nothing have an order in
    which no beginning adds up to more than the longest of them times the dimension (Steinitz).

    Args:
      count: int[blocks, members], pages of each group in each block.
      path: float[1 + rounds, members], pages sent after so many rounds; ends at the sum of `count`.

    Returns:
      int[blocks].
    """
    total = path.sum(axis=1)
    due = np.stack([np.interp(np.arange(total[-1] + 1), total, x) for x in path.T], axis=1)
    # Candidates from all over the memory: neighbours are often alike.
    queue = np.argsort(np.arange(len(count)) * GOLDEN % 1)
    now, queue = np.split(queue, [CANDIDATES])
    size, sent, order = count.sum(axis=1), np.zeros(count.shape[1]), []
    at = 0
    for k in range(len(count)):
        wrong = sent + count[now] - due[at + size[now]]
        best = int((wrong**2).sum(axis=1).argmin())
        block = int(now[best])
        order.append(block)
        sent, at = sent + count[block], at + int(size[block])
        if k < len(queue):
            now[best] = queue[k]
        else:
            now = np.delete(now, best)
    return np.array(order, np.int64)


def _pages(slots: np.ndarray, page: np.ndarray) -> np.ndarray:
    return np.where(slots == NOBODY, NULL_PAGE, np.append(page, NULL_PAGE)[slots])


class _Room:
    """The pages of the new groups in whose memory nothing lies that has still to leave."""

    def __init__(self, moves: PageMoves, old: Pools, new: Pools):
        self.moves, self.old, self.new = moves, old, new
        self.fewer = min(old.groups, new.groups)
        self.due = np.zeros(old, np.int64)  # moves of each old page to come
        np.add.at(self.due, (moves.old_group, moves.old_page), 1)
        self.in_the_way = np.zeros(new, np.int64)  # old pages in the memory of each new one
        np.add.at(self.in_the_way, self._beside(*np.nonzero(self.due)), 1)
        self.free = [np.flatnonzero(row == 0).tolist() for row in self.in_the_way]
        for pages in self.free:
            if pages and pages[0] == NULL_PAGE:
                del pages[0]

    def leave(self, sent: np.ndarray) -> None:
        """The moves `sent`, int[sent], have been packed."""
        at = self.moves.old_group[sent], self.moves.old_page[sent]
        np.subtract.at(self.due, at, 1)
        left = np.unique(np.stack(at), axis=1)
        beside = self._beside(*left[:, self.due[tuple(left)] == 0])
        np.subtract.at(self.in_the_way, beside, 1)
        group, page = np.unique(np.stack(beside), axis=1)
        is_free = (self.in_the_way[group, page] == 0) & (page != NULL_PAGE)
        for g, number in zip(group[is_free].tolist(), page[is_free].tolist(), strict=True):
            self.free[g].append(number)

    def take(self, group: np.ndarray) -> np.ndarray | None:
        """A free page for each entry of `group`, int[pages]; None, and none is taken, if some lack."""
        wanted = Counter(group.tolist())
        if any(n > len(self.free[g]) for g, n in wanted.items()):
            return None
        return np.array([self.free[g].pop() for g in group.tolist()], np.int64)

    def _beside(self, group: np.ndarray, page: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Groups and pages of the new layout in whose memory some old pages lie, on any device."""
        old, new = self.old.pages, self.new.pages
        first, last = page * new // old, ((page + 1) * new - 1) // old
        pages = first[:, None] + np.arange(-(-new // old) + 1)
        groups = (group % self.fewer)[:, None] + np.arange(0, self.new.groups, self.fewer)
        shape = len(group), groups.shape[1], pages.shape[1]
        is_there = np.broadcast_to((pages <= last[:, None])[:, None], shape)
        where = (np.broadcast_to(x, shape)[is_there] for x in (groups[:, :, None], pages[:, None]))
        group, page = where
        return group, page
