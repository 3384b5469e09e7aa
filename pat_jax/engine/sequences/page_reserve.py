"""Pages that the host reserves for rows to take during bursts, and how many are known to be taken.

Host accounts in NumPy. The devices take pages by `device/decode/page_append.py`, and the host
learns of it a burst later.
"""

import numpy as np

from pat_jax.engine.sequences.page_allocator import PageAllocator
from pat_jax.engine.sequences.state import ReservedPages
from pat_jax.models.cache.paged_layer import NULL_PAGE


class PageReserve:
    """A reserve of pages for each replica.

    From the first burst dispatched to the last one collected, only the reserve takes pages from
    the pools."""

    def __init__(self, pools: list[PageAllocator], size: int):
        """
        Args:
          size: the most pages of a replica's reserve at a time.
        """
        self.pools = pools
        self._ring = np.full((len(pools), size), NULL_PAGE, np.int32)
        self._filled = np.zeros(len(pools), np.int64)
        self._drawn = np.zeros(len(pools), np.int64)

    @property
    def left(self) -> np.ndarray:
        """The number of each replica's reserved pages that are not known to be taken."""
        return self._filled - self._drawn

    def can_hold(self, pages: np.ndarray) -> bool:
        """Returns whether each replica g has `pages[g]` pages that are reserved or free."""
        return bool((self.left + [pool.num_free for pool in self.pools] >= pages).all())

    def fill(self, pages: np.ndarray) -> None:
        """Fills the reserve of replica g up to `pages[g]` pages, as far as pages are free."""
        for replica, (pool, ring) in enumerate(zip(self.pools, self._ring, strict=True)):
            more = min(int(pages[replica] - self.left[replica]), pool.num_free)
            if more > 0:
                taken = pool.take(more)
                assert taken is not None, "counted"
                ring[(self._filled[replica] + np.arange(more)) % len(ring)] = taken
                self._filled[replica] += more

    def laid_out(self) -> ReservedPages:
        """Returns the reserve in the form that the devices use."""
        return ReservedPages(self._ring.copy(), self._filled.astype(np.int32))

    def note_drawn(self, pages: np.ndarray) -> None:
        """Notes how many more pages of each replica have been taken, int[replicas]."""
        self._drawn += pages

    def take_back(self) -> None:
        """Releases the pages left in the reserve."""
        for pool, ring, first, stop in zip(
            self.pools, self._ring, self._drawn, self._filled, strict=True
        ):
            pool.release(ring[np.arange(first, stop) % len(ring)])
        self._filled[:] = self._drawn
