"""Orders the migration of pages in a switch: in which round each is sent, and where it arrives.

The pools of the old and the new layout use the same memory. A round packs all its pages before it
unpacks any, so that leaving pages make room for arriving ones. Pages that find no room yet wait in
receive buffers until later rounds are packed. So a switch works even with full pools. The highest
page numbers leave first, so that all replicas free the same part of memory. If free memory is so
scattered that too many pages would wait, a few sequences are left behind and recomputed. All on the
host, in NumPy. An old and a new replica share devices if their numbers are congruent modulo the
smaller number of replicas; see `SequenceTable.regroup`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pat_jax.engine.relocation.rounds import ALL, SIZES, Round, Shipment, rounds
from pat_jax.engine.sequences.page_allocator import NULL_PAGE
from pat_jax.engine.sequences.prefill_calls import PageMoves

NO_MOVE = -1
# most pages per replica that wait in receive buffers: those of two large rounds
MOST_WAITING = 2 * SIZES[0]


class Pools(NamedTuple):
    """The pools of a layout. In every layout they take the same memory of a device."""

    replicas: int
    pages: int  # of each replica, NULL_PAGE included


class Placed(NamedTuple):
    """The new number of every page that moves, and the round in which it is sent."""

    new_page: np.ndarray  # int[moves]; NULL_PAGE if the page stays behind
    shipments: list[Shipment]


def placed(moves: PageMoves, holds: Sequence[np.ndarray], old: Pools, new: Pools) -> Placed:
    """Returns the new number of each page and its round, so that at most `MOST_WAITING` pages wait.

    If more would wait, the shortest of the sequences with waiting pages stay behind: first one of
    them, then two more, then four more.

    Args:
      moves: one move for each page that arrives, at most what the new pools hold; their `new_page`
        is not used.
      holds: for each sequence, int[pages], the indices in `moves` of its pages, which it may share.
    """
    going = sorted(holds, key=len)
    num_late = 1
    while True:
        goes = np.unique(np.concatenate([np.zeros(0, int), *going]))
        found = _tried(moves.part(goes), old, new)
        if isinstance(found, Placed):
            new_page = np.full(len(moves.old_page), NULL_PAGE)
            new_page[goes] = found.new_page
            return Placed(new_page, found.shipments)
        waits = np.zeros(len(moves.old_page), bool)
        waits[goes[found]] = True
        late = [k for k, mine in enumerate(going) if waits[mine].any()][:num_late]
        going = [mine for k, mine in enumerate(going) if k not in late]
        num_late *= 2  # one is usually enough


def _tried(moves: PageMoves, old: Pools, new: Pools) -> Placed | np.ndarray:
    """Places the pages of all `moves`. If too many wait, returns their moves, int[waiting]."""
    leaving = _Leaving(moves, old, new)
    plan = leaving.rounds()
    slots = list(leaving.slots(plan))
    room = _Room(moves, old, new)
    new_page = np.full(len(moves.old_page), NULL_PAGE)
    waiting: dict[int, np.ndarray] = {}  # moves of rounds, which are numbered
    puts = []
    for number, mine in enumerate(slots):
        waiting[number] = mine[mine != NO_MOVE]
        room.leave(waiting[number])
        puts.append([])
        for other in list(waiting):
            sent = waiting[other]
            if (places := room.take(moves.new_replica[sent])) is not None:
                new_page[sent] = places
                del waiting[other]
                puts[-1].append(other)
        if sum(leaving.waiting(plan[one]) for one in waiting) > MOST_WAITING:
            return np.concatenate(list(waiting.values()))
    assert not waiting, "the pools hold all that arrives"
    shipments = [
        Shipment(step, _pages(mine, moves.old_page), _pages(mine, new_page), tuple(put))
        for step, mine, put in zip(plan, slots, puts, strict=True)
    ]
    return Placed(new_page, shipments)


class _Leaving:
    """The moves of each replica of the narrow layout, the one with less TP, to put into rounds."""

    def __init__(self, moves: PageMoves, old: Pools, new: Pools):
        self.is_up = old.replicas >= new.replicas
        self.replica = moves.old_replica if self.is_up else moves.new_replica
        self.num_replicas = max(old.replicas, new.replicas)
        self.num_members = self.num_replicas // min(old.replicas, new.replicas)
        self.old_page = moves.old_page

    def rounds(self) -> list[Round]:
        """The rounds in order. Rounds of single replicas run when memory allows it best.

        If TP rises, they run first: all devices receive a part of what one replica frees. If TP
        falls, they run last.
        """
        plan = rounds(np.bincount(self.replica, minlength=self.num_replicas))
        return plan[::-1] if self.is_up else plan

    def slots(self, plan: Sequence[Round]) -> Iterator[np.ndarray]:
        """Yields each round's moves by slot, int[narrow replicas, size]; NO_MOVE if it is empty."""
        queue = [np.flatnonzero(self.replica == g) for g in range(self.num_replicas)]
        queue = [mine[np.argsort(-self.old_page[mine], kind="stable")] for mine in queue]
        for step in plan:
            slots = np.full((self.num_replicas, step.size), NO_MOVE)
            for g in range(self.num_replicas) if step.replica == ALL else (step.replica,):
                now, queue[g] = np.split(queue[g], [step.size])
                slots[g, : len(now)] = now
            yield slots

    def waiting(self, step: Round) -> float:
        """A device's memory that a waiting round takes, in pages of a round of all replicas."""
        is_part = self.is_up and step.replica != ALL
        return step.size / self.num_members if is_part else step.size


def _pages(slots: np.ndarray, page: np.ndarray) -> np.ndarray:
    return np.where(slots == NO_MOVE, NULL_PAGE, np.append(page, NULL_PAGE)[slots])


class _Room:
    """The free pages of the new replicas, whose memory holds no old page that has yet to leave."""

    def __init__(self, moves: PageMoves, old: Pools, new: Pools):
        self.moves = moves
        self.old = old
        self.new = new
        self.fewer = min(old.replicas, new.replicas)
        self.due = np.zeros(old, np.int64)  # for each old page, the number of moves not yet packed
        np.add.at(self.due, (moves.old_replica, moves.old_page), 1)
        self.in_the_way = np.zeros(new, np.int64)  # number of old pages in each new page's memory
        replica, page = np.nonzero(self.due)
        np.add.at(self.in_the_way, self._beside(replica, page), 1)
        self.free = [np.flatnonzero(row == 0).tolist() for row in self.in_the_way]
        for pages in self.free:
            if pages and pages[0] == NULL_PAGE:
                del pages[0]

    def leave(self, sent: np.ndarray) -> None:
        """Frees the memory of old pages once their moves, int[sent], are packed."""
        at = self.moves.old_replica[sent], self.moves.old_page[sent]
        np.subtract.at(self.due, at, 1)
        left = np.unique(np.stack(at), axis=1)
        replica, page = left[:, self.due[tuple(left)] == 0]
        beside = self._beside(replica, page)
        np.subtract.at(self.in_the_way, beside, 1)
        replica, page = np.unique(np.stack(beside), axis=1)
        is_free = (self.in_the_way[replica, page] == 0) & (page != NULL_PAGE)
        for g, number in zip(replica[is_free].tolist(), page[is_free].tolist(), strict=True):
            self.free[g].append(number)

    def take(self, replica: np.ndarray) -> np.ndarray | None:
        """Takes a free page for each entry of `replica`, int[pages]; None if too few are free."""
        wanted = Counter(replica.tolist())
        if any(n > len(self.free[g]) for g, n in wanted.items()):
            return None
        return np.array([self.free[g].pop() for g in replica.tolist()], np.int64)

    def _beside(self, replica: np.ndarray, page: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Replicas and pages of the new layout that share memory with old pages, on any device."""
        old = self.old.pages
        new = self.new.pages
        first = page * new // old
        last = ((page + 1) * new - 1) // old
        pages = first[:, None] + np.arange(-(-new // old) + 1)
        replicas = (replica % self.fewer)[:, None] + np.arange(0, self.new.replicas, self.fewer)
        shape = len(replica), replicas.shape[1], pages.shape[1]
        is_there = np.broadcast_to((pages <= last[:, None])[:, None], shape)
        replica = np.broadcast_to(replicas[:, :, None], shape)[is_there]
        return replica, np.broadcast_to(pages[:, None], shape)[is_there]
