"""Which sequence holds which pages, in the pool of its data-parallel group. All on the host.

The scheduler says who gets pages and who has to give them back.
"""

from collections import defaultdict

import numpy as np

from pat_jax.engine.sequences.accounts import NO_SEQUENCE
from pat_jax.engine.sequences.page_allocator import (
    NO_PAGES,
    NULL_PAGE,
    PageAllocator,
    num_pages_for,
)
from pat_jax.engine.sequences.prefill_calls import PageMoves
from pat_jax.engine.sequences.sequence_table import SequenceTable

NO_GROUP = -1
# Where pages have come to in a pool, by (old group, new group).
Moved = defaultdict[tuple[int, int], dict[int, int]]


class BlockTables:
    """Pages of a scheduler's sequences; each data-parallel group has a pool of them."""

    def __init__(self, table: SequenceTable, *, num_pages: int, page_size: int):
        self.table, self.page_size = table, page_size
        self.pools = self._new_pools(table.num_groups, num_pages)
        count = len(table.requests)
        self._pages = [NO_PAGES] * count
        self._num_pages = np.zeros(count, np.int64)  # of each sequence
        self._group = np.full(count, NO_GROUP, np.int64)  # where each has or had its pages
        prompts: dict[tuple[int, ...], int] = {}
        self._prompt = [prompts.setdefault(r.tokens, len(prompts)) for r in table.requests]
        self._home = [NO_GROUP] * len(prompts)  # where a sample of each got pages last

    def _new_pools(self, num_groups: int, num_pages: int) -> list[PageAllocator]:
        longest = int(self.table.end.max(initial=1)) - 1
        if num_pages_for(longest, self.page_size) >= num_pages:
            raise ValueError(
                f"a pool of {num_pages} pages of {self.page_size} tokens does not hold a sequence "
                f"of {longest} tokens."
            )
        return [PageAllocator(num_pages, self.page_size) for _ in range(num_groups)]

    @property
    def most_pages(self) -> int:
        """Pages of the sequence that has most of them: no table has to be wider."""
        return int(self._num_pages.max(initial=0))

    @property
    def pages_held(self) -> int:
        """Pages of all groups that sequences hold, and that are laid out; a shared one counts once."""
        return sum(pool.capacity - pool.num_free for pool in self.pools)

    @property
    def unused(self) -> int:
        """Tokens that live sequences have room for, and do not hold."""
        live = self.table.live
        held = self._num_pages[live] * self.page_size - (self.table.length[live] - 1)
        return int(held.sum())

    def block_tables(self, sequences: np.ndarray, width: int) -> np.ndarray:
        """The first pages of some sequences, int32[sequences, width]; NULL_PAGE past the last.

        Args:
          sequences: int[sequences]; a row of NO_SEQUENCE has NULL_PAGE alone.
          width: for decoding at least `most_pages`; a prefill needs those of its context only.
        """
        tables = np.full((len(sequences), width), NULL_PAGE, np.int32)
        for row, i in enumerate(sequences.tolist()):
            if i != NO_SEQUENCE:
                pages = self._pages[i][:width]
                tables[row, : len(pages)] = pages
        return tables

    def lacking(self, steps: int) -> np.ndarray:
        """Pages that the live sequences of each group need besides their own for `steps` tokens."""
        live, _, pages = self._wanted(steps)
        more = np.maximum(pages - self._num_pages[live], 0)
        return np.bincount(self._group[live], more, minlength=len(self.pools)).astype(np.int64)

    def add(self, pages: np.ndarray) -> np.ndarray:
        """Takes note of what rows drew during a burst; to be told before its results are.

        Args:
          pages: int32[rows, most], NULL_PAGE after the last. A sequence that has ended meanwhile keeps none.

        Returns:
          int[groups], pages drawn by each.
        """
        occupants, drawn = self.table.occupants, np.zeros(len(self.pools), np.int64)
        counts = (pages != NULL_PAGE).sum(axis=1)
        for row in np.flatnonzero(counts).tolist():
            group, i = row // self.table.rows_per_group, int(occupants[row])
            new = pages[row, : counts[row]]
            drawn[group] += len(new)
            if i == NO_SEQUENCE:
                self.pools[group].release(new)
            else:
                self._pages[i] = np.concatenate([self._pages[i], new])
                self._num_pages[i] = len(self._pages[i])
        return drawn

    def _wanted(self, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The live sequences, the tokens of each after `steps`, and the pages of these; int[live] each."""
        table = self.table
        live = table.live
        tokens = np.minimum(table.length[live] - 1 + steps, table.end[live] - 1)
        return live, tokens, -(-tokens // self.page_size)

    def _take(self, sequence: int, group: int, pages: np.ndarray) -> None:
        self._pages[sequence], self._num_pages[sequence] = pages, len(pages)
        self._group[sequence] = self._home[self._prompt[sequence]] = group

    def _release(self, sequence: int) -> None:
        self.pools[self._group[sequence]].release(self._pages[sequence])
        self._pages[sequence], self._num_pages[sequence] = NO_PAGES, 0

    def _adopt(
        self, sequence: int, group: int, origin: list[PageAllocator], moved: Moved
    ) -> list[tuple[int, int, int, int]] | None:
        """Pages in a `group` for what a sequence has in one of the pools of its `origin`.

        Returns:
          Of each page that has to move the group and number there, and here; None if pages lack.
        """
        old, length = int(self._group[sequence]), int(self.table.length[sequence])
        filled = self._pages[sequence][: num_pages_for(length - 1, self.page_size)]
        adopted = self.pools[group].adopt(filled, origin[old], moved[old, group])
        if adopted is None:
            return None
        pages, num_found = adopted
        self._take(sequence, group, pages)
        return [(old, a, group, b) for a, b in zip(filled, pages, strict=True)][num_found:]

    def _renumber(self, sequences: np.ndarray, moves: PageMoves, new_page: np.ndarray) -> None:
        """The pages of pools in which nothing but `moves` has arrived, as `new_page`, int[moves].

        Args:
          sequences: int[sequences], all that have pages there.
        """
        number = np.zeros((len(self.pools), self.pools[0].num_pages), np.int32)
        number[moves.new_group, moves.new_page] = new_page
        for group, pool in enumerate(self.pools):
            mine = moves.new_group == group
            pool.renumber(moves.new_page[mine], new_page[mine])
        for i in sequences.tolist():
            self._pages[i] = number[self._group[i]][self._pages[i]]
