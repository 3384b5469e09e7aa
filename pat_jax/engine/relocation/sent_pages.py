"""Pages that are sent to other groups before their sequences go there: the first of a move's two stages.

A page that is full of tokens that were said does not change any more, so a copy of it can be on its way
while its sequence decodes on. Host accounts in NumPy: which pages, and which of them still count.
"""

from collections.abc import Iterator

import numpy as np

from pat_jax.engine.relocation.rounds import SHIFT_SIZES, Shift, shifts
from pat_jax.engine.sequences.block_tables import BlockTables
from pat_jax.engine.sequences.page_allocator import NULL_PAGE
from pat_jax.engine.sequences.prefill_calls import Move, PageMoves


class SentPages:
    """The full pages of sequences that are to move, until they do."""

    def __init__(self, tables: BlockTables, group: np.ndarray, rounds: int):
        """
        Args:
          group: int[live], where each sequence is to be.
          rounds: large ones, as many pages as which are sent at most; the others move with their sequences.
        """
        self.tables, table = tables, tables.table
        live = table.live
        is_moved = group != table.group(live)
        self._group = dict(zip(live[is_moved].tolist(), group[is_moved].tolist(), strict=True))
        full = (table.length - 1) // tables.page_size
        self._pages = {i: tables.of(i)[: full[i]].copy() for i in self._group}
        self._old_group = {i: int(tables.group[i]) for i in self._group}
        self.shifts = tuple(self._within(rounds * SHIFT_SIZES[0]))

    def _within(self, slots: int) -> Iterator[Shift]:
        """Rounds of so many pages of a group in all."""
        for shift in shifts(self._moves(), len(self.tables.pools)):
            slots -= shift.old_page.shape[1]
            if slots < 0:
                return
            yield shift

    def _moves(self) -> PageMoves:
        """To no page yet: where there is room for them is seen when their sequences come."""
        moves = [
            Move(self._old_group[i], pages, self._group[i], np.full_like(pages, NULL_PAGE))
            for i, pages in self._pages.items()
        ]
        every = np.stack(PageMoves.of(moves))
        return PageMoves(*np.unique(every, axis=1))  # shared ones once

    def groups(self) -> np.ndarray:
        """Where the live sequences are to be now, int[live]: those that began since stay."""
        table = self.tables.table
        pairs = zip(table.live.tolist(), table.group(table.live).tolist(), strict=True)
        # One that had to make room may have come back in any group.
        return np.array(
            [self._group[i] if self._old_group.get(i) == g else g for i, g in pairs], np.int64
        )

    def is_kept(self) -> np.ndarray:
        """Of which pages copies were sent that still count, bool[old groups, new groups, pages].

        They do as long as a sequence has the page that had it then, at the same place.
        """
        groups, size = len(self.tables.pools), self.tables.pools[0].num_pages
        is_sent = np.zeros((groups, groups, size), bool)
        for shift in self.shifts:
            for g, pages in enumerate(shift.old_page):
                is_sent[g, (g + shift.distance) % groups, pages] = True
        is_held = np.zeros((groups, 1, size), bool)
        for i, pages in self._pages.items():
            group, now = self._old_group[i], self.tables.of(i)[: len(pages)]
            if self.tables.group[i] == group and np.array_equal(now, pages):
                is_held[group, 0, pages] = True
        return is_sent & is_held
