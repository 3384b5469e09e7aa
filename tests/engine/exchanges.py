"""Loads of pages that fill pools, for exchanges between two layouts in one memory."""

from dataclasses import dataclass

import numpy as np

from pat_jax.engine.relocation.order import Pools
from pat_jax.engine.sequences.page_allocator import NULL_PAGE
from pat_jax.engine.sequences.prefill_calls import PageMoves


@dataclass(frozen=True)
class Geometry:
    """A wide page takes one cell of each of its devices, a narrow one `ways` of one device."""

    wide_replicas: int
    ways: int
    copies: int
    pages: int  # narrow
    is_up: bool

    @property
    def members(self) -> int:
        return self.ways * self.copies

    @property
    def narrow(self) -> Pools:
        return Pools(self.wide_replicas * self.members, self.pages)

    @property
    def wide(self) -> Pools:
        return Pools(self.wide_replicas, self.pages * self.ways)

    @property
    def pools(self) -> tuple[Pools, Pools]:
        return (self.narrow, self.wide) if self.is_up else (self.wide, self.narrow)


def drawn(geometry: Geometry, rng: np.random.Generator, fill: float, skew: float) -> PageMoves:
    """Pages that leave, each to a replica that has room; `fill` of what the pools hold.

    Args:
      skew: 0: each replica has or gets as many as any other; 1: anything.
    """
    old, new = geometry.pools
    moves = []
    room = dict.fromkeys(range(new.replicas), int(fill * (new.pages - 1)))
    if geometry.is_up:
        share = 1 - skew * rng.random(old.replicas)
        held = np.minimum(old.pages - 1, fill * old.pages * share).astype(int)
        pages = [
            (replica, page)
            for replica in range(old.replicas)
            for page in (1 + rng.permutation(old.pages - 1)[: held[replica]]).tolist()
        ]
        for replica, page in (pages[k] for k in rng.permutation(len(pages))):
            target = replica % new.replicas
            if room[target]:
                room[target] -= 1
                moves.append((replica, page, target, NULL_PAGE))
    else:
        weight = 1 - skew * rng.random(new.replicas)
        for replica in range(old.replicas):
            members = np.arange(replica, new.replicas, old.replicas)
            for page in (1 + rng.permutation(old.pages - 1)[: int(fill * old.pages)]).tolist():
                # Of two replicas alike the emptier one.
                full = [
                    (new.pages - room[g]) / weight[g] + 1e6 * (not room[g])
                    for g in members.tolist()
                ]
                target = int(members[np.argmin(full)])
                if room[target]:
                    room[target] -= 1
                    moves.append((replica, page, target, NULL_PAGE))
                if rng.random() < 0.05 and len(members) > 1:  # a prefix that several share
                    other = int(rng.choice(members[members != target]))
                    if room[other]:
                        room[other] -= 1
                        moves.append((replica, page, other, NULL_PAGE))
    return PageMoves(*np.array(moves, np.int64).reshape(-1, 4).T)
