"""Even loads: which live sequences go to other replicas of the layout they are in.

The fullest replica sets the step time. Host accounts in NumPy. The planner decides whether it pays, the
scheduler moves the pages.
"""

from collections.abc import Sequence

import numpy as np

from pat_jax.engine.sequences.sequence_table import SequenceTable


def options(
    table: SequenceTable, pages: np.ndarray, free: np.ndarray, row_buckets: Sequence[int]
) -> list[np.ndarray]:
    """Where sequences would be, int[live]: for each smaller row bucket that could hold every group, and
    as evenly as they can be.

    None while sequences wait: they get the rows that become free, and keep the groups even.

    Args:
      pages: int[live], that each sequence holds.
      free: int[groups], that each group can still give out.
      row_buckets: rows of one group.
    """
    if table.num_groups == 1 or len(table.waiting) or not len(table.live):
        return []
    group = table.group(table.live)
    even = -(-len(group) // table.num_groups)
    smaller = {rows for rows in (even, *row_buckets) if even <= rows < table.fullest}
    found = (evened(group, pages, free, rows) for rows in sorted(smaller))
    return [new for new in found if new is not None]


def evened(group: np.ndarray, pages: np.ndarray, free: np.ndarray, most: int) -> np.ndarray | None:
    """The group of each sequence, int[live], when none has more than `most`; None if pages lack.

    As few move as can, those with fewest pages, each to the emptiest group that has as many. No group
    both gives sequences away and gets some: pages that leave make no room for pages that arrive.
    """
    count, new, free = np.bincount(group, minlength=len(free)), group.copy(), free.copy()
    for i in np.argsort(pages, kind="stable"):
        if count[group[i]] <= most:
            continue
        fits = np.flatnonzero((count < most) & (free >= pages[i]))
        if not len(fits):
            return None
        new[i] = target = fits[np.lexsort((-free[fits], count[fits]))[0]]
        count[group[i]] -= 1
        count[target] += 1
        free[target] -= pages[i]
    return new
