"""Pages that the host has laid out for rows to draw during bursts, and what it knows to be drawn.

Host accounts in NumPy; the devices draw by `device/decode/page_append.py`. The host learns of it a
burst later.
"""

import numpy as np

from pat_jax.engine.sequences.page_allocator import PageAllocator
from pat_jax.engine.sequences.state import ReservedPages
from pat_jax.models.cache.paged_layer import NULL_PAGE


class PageReserve:
    """Every replica has one. From the first burst that is dispatched to the last one collected,
    pages leave the pools for nothing else."""

    def __init__(self, pools: list[PageAllocator], size: int):
        """`size`: pages that the reserve of a replica may hold at a time."""
        self.pools = pools
        self._ring = np.full((len(pools), size), NULL_PAGE, np.int32)
        self._filled = np.zeros(len(pools), np.int64)
        self._drawn = np.zeros(len(pools), np.int64)

    @property
    def left(self) -> np.ndarray:
        """Pages of each replica that are not drawn, as far as is known; int[replicas]."""
        return self._filled - self._drawn

    def can_hold(self, pages: np.ndarray) -> bool:
        """Whether there are as many, int[replicas], laid out or free."""
        return bool((self.left + [pool.num_free for pool in self.pools] >= pages).all())

    def fill(self, pages: np.ndarray) -> None:
        """Lays out as many, int[replicas], or as many as there are."""
        for replica, (pool, ring) in enumerate(zip(self.pools, self._ring, strict=True)):
            more = min(int(pages[replica] - self.left[replica]), pool.num_free)
            if more > 0:
                taken = pool.take(more)
                assert taken is not None, "counted"
                ring[(self._filled[replica] + np.arange(more)) % len(ring)] = taken
                self._filled[replica] += more

    def laid_out(self) -> ReservedPages:
        """For the devices."""
        return ReservedPages(self._ring.copy(), self._filled.astype(np.int32))

    def note_drawn(self, pages: np.ndarray) -> None:
        """That so many more of each replica are drawn, int[replicas]."""
        self._drawn += pages

    def take_back(self) -> None:
        """What is left is free again."""
        for pool, ring, first, stop in zip(
            self.pools, self._ring, self._drawn, self._filled, strict=True
        ):
            pool.release(ring[np.arange(first, stop) % len(ring)])
        self._filled[:] = self._drawn
