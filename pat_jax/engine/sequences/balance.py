"""Even loads: which running sequences go to other replicas of the layout they are in.

The fullest replica sets the step time. Host accounts in NumPy. The planner decides whether it pays,
the cache manager moves the pages.
"""

from collections.abc import Sequence

import numpy as np

from pat_jax.engine.sequences.sequence_table import SequenceTable


def options(
    table: SequenceTable, pages: np.ndarray, free: np.ndarray, row_buckets: Sequence[int]
) -> list[np.ndarray]:
    """Where sequences would be, int[running]: for each smaller row bucket that could hold every
    replica, and as evenly as they can be.

    None while sequences wait: they get the rows that become free, and keep the replicas even.

    Args:
      pages: int[running], that each sequence holds.
      free: int[replicas], that each replica can still give out.
      row_buckets: rows of one replica.
    """
    if table.num_replicas == 1 or len(table.waiting) or not len(table.running):
        return []
    replica = table.replica(table.running)
    even = -(-len(replica) // table.num_replicas)
    smaller = {rows for rows in (even, *row_buckets) if even <= rows < table.fullest}
    found = (evened(replica, pages, free, rows) for rows in sorted(smaller))
    return [new for new in found if new is not None]


def evened(
    replica: np.ndarray, pages: np.ndarray, free: np.ndarray, most: int
) -> np.ndarray | None:
    """The replica of each sequence, int[running], when none has more than `most`; None if pages
    lack.

    As few move as can, those with fewest pages, each to the emptiest replica that has as many. No
    replica both gives sequences away and gets some: pages that leave make no room for pages that
    arrive.
    """
    count, new, free = np.bincount(replica, minlength=len(free)), replica.copy(), free.copy()
    for i in np.argsort(pages, kind="stable"):
        if count[replica[i]] <= most:
            continue
        fits = np.flatnonzero((count < most) & (free >= pages[i]))
        if not len(fits):
            return None
        new[i] = target = fits[np.lexsort((-free[fits], count[fits]))[0]]
        count[replica[i]] -= 1
        count[target] += 1
        free[target] -= pages[i]
    return new
