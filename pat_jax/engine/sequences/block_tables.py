"""Which sequence holds which pages, in the pool of its replica. All on the host.

The scheduler says who gets pages and who has to give them back.
"""

import numpy as np

from pat_jax.engine.sequences.page_allocator import NULL_PAGE, PageAllocator, num_pages_for
from pat_jax.engine.sequences.prefill_calls import Move, PageMoves
from pat_jax.engine.sequences.sequence_table import NO_SEQUENCE, SequenceTable

NO_GROUP = -1


class Moved(dict[tuple[int, int], np.ndarray]):
    """Where pages have come to, int32[pages], by (old group, new group); NULL_PAGE: nowhere yet."""

    def __init__(self, num_pages: int):
        super().__init__()
        self.num_pages = num_pages

    def __missing__(self, groups: tuple[int, int]) -> np.ndarray:
        self[groups] = np.full(self.num_pages, NULL_PAGE, np.int32)
        return self[groups]


def pages_with(table: SequenceTable, tokens: int, page_size: int) -> np.ndarray:
    """Pages that hold each live sequence with so many `tokens` more, int[live], or up to its end."""
    live = table.live
    most = np.minimum(table.length[live] - 1 + tokens, table.end[live] - 1)
    return -(-most // page_size)


class BlockTables:
    """The pages of a table's sequences; each replica has a pool of them."""

    def __init__(self, table: SequenceTable, *, num_pages: int, page_size: int):
        """
        Args:
          num_pages: of each group's pool; enough for the longest sequence alone.
        """
        self.table, self.page_size = table, page_size
        self.pools = self.new_pools(table.num_groups, num_pages)
        most = num_pages_for(int(table.end.max(initial=1)) - 1, page_size)
        # Pages of each sequence in order of position, NULL_PAGE after the last, and their number. By far
        # the most of it is never touched: memory that begins as zeros is not even there until then.
        assert NULL_PAGE == 0
        self.pages = np.zeros((len(table), most), np.int32)
        self.count = np.zeros(len(table), np.int64)
        self.group = np.full(len(table), NO_GROUP, np.int64)  # where each has or had its pages

    def new_pools(self, num_groups: int, num_pages: int) -> list[PageAllocator]:
        """
        Raises:
          ValueError: they do not hold the longest sequence.
        """
        longest = int(self.table.end.max(initial=1)) - 1
        if num_pages_for(longest, self.page_size) >= num_pages:
            raise ValueError(
                f"a pool of {num_pages} pages of {self.page_size} tokens does not hold a sequence "
                f"of {longest} tokens."
            )
        return [PageAllocator(num_pages, self.page_size) for _ in range(num_groups)]

    @property
    def free(self) -> np.ndarray:
        """Pages that each group can give out, int[groups]."""
        return np.array([pool.num_free for pool in self.pools], np.int64)

    @property
    def num_held(self) -> int:
        """Pages of all groups that sequences hold, and that are laid out; a shared one counts once."""
        return sum(pool.capacity - pool.num_free for pool in self.pools)

    @property
    def unused(self) -> int:
        """Tokens that live sequences have room for, and do not hold."""
        live = self.table.live
        return int((self.count[live] * self.page_size - (self.table.length[live] - 1)).sum())

    def of(self, sequence: int) -> np.ndarray:
        """The pages of a sequence, int32[pages]; not a copy."""
        return self.pages[sequence, : self.count[sequence]]

    def rows(self, sequences: np.ndarray, width: int) -> np.ndarray:
        """The first pages of some sequences, int32[sequences, width]; NULL_PAGE past the last.

        Args:
          sequences: int[sequences]; a row of NO_SEQUENCE has NULL_PAGE alone.
          width: for decoding enough for all that they hold; a prefill needs those of its context only.
        """
        rows = np.full((len(sequences), width), NULL_PAGE, np.int32)
        is_there = sequences != NO_SEQUENCE
        pages = self.pages[sequences[is_there], :width]
        rows[is_there, : pages.shape[1]] = pages
        return rows

    def lacking(self, steps: int) -> np.ndarray:
        """Pages that the live sequences of each group need besides their own for `steps` tokens."""
        live = self.table.live
        more = self._missing(steps)
        return np.bincount(self.group[live], more, minlength=len(self.pools)).astype(np.int64)

    def _missing(self, steps: int) -> np.ndarray:
        """The same of each live sequence, int[live]."""
        needed = pages_with(self.table, steps, self.page_size)
        return np.maximum(needed - self.count[self.table.live], 0)

    def extend(self, steps: int) -> None:
        """Pages for the next `steps` tokens of every live sequence; there are as many."""
        live, more = self.table.live, self._missing(steps)
        group = self.group[live]
        for g in np.unique(group[more > 0]).tolist():
            mine = live[group == g]
            counts = more[group == g]
            taken = self.pools[g].take(int(counts.sum()))
            assert taken is not None, "there is room for more"
            self._append(np.repeat(mine, counts), turns(counts), taken)
            self.count[mine] += counts

    def add(self, drawn: np.ndarray) -> np.ndarray:
        """Takes note of what rows drew during a burst; to be told before its results are.

        Args:
          drawn: int32[rows, most], NULL_PAGE after the last. A sequence that has ended meanwhile
            keeps none.

        Returns:
          int[groups], pages drawn by each.
        """
        occupants, counts = self.table.occupants, (drawn != NULL_PAGE).sum(axis=1)
        row, turn = np.repeat(np.arange(len(counts)), counts), turns(counts)
        sequence, pages = occupants[row], drawn[row, turn]
        is_kept = sequence != NO_SEQUENCE
        self._append(sequence[is_kept], turn[is_kept], pages[is_kept])
        at = np.flatnonzero(occupants != NO_SEQUENCE)
        self.count[occupants[at]] += counts[at]
        group = row // self.table.rows_per_group
        for g in np.unique(group[~is_kept]).tolist():
            self.pools[g].release(pages[~is_kept & (group == g)])
        return np.bincount(group, minlength=len(self.pools))

    def _append(self, sequence: np.ndarray, turn: np.ndarray, pages: np.ndarray) -> None:
        """To each sequence its `turn`-th page more, int[pages] each."""
        self.pages[sequence, self.count[sequence] + turn] = pages

    def give(self, sequence: int, group: int, pages: np.ndarray) -> None:
        """All that a sequence has, in the pool of its `group`."""
        self.pages[sequence, len(pages) : self.count[sequence]] = NULL_PAGE
        self.pages[sequence, : len(pages)] = pages
        self.count[sequence], self.group[sequence] = len(pages), group

    def forget(self, sequences: np.ndarray) -> None:
        """They hold nothing; what they held is no longer there, or another's."""
        most = int(self.count[sequences].max(initial=0))
        self.pages[sequences, :most], self.count[sequences] = NULL_PAGE, 0

    def release(self, sequences: np.ndarray) -> None:
        """Their pages are free again, where no other sequence holds them as well."""
        for group in np.unique(self.group[sequences]).tolist():
            mine = sequences[self.group[sequences] == group]
            self.pools[group].release(*(self.of(i) for i in mine.tolist()))
        self.forget(sequences)

    def adopt(
        self, sequence: int, group: int, origin: list[PageAllocator], moved: Moved
    ) -> Move | None:
        """Pages in a `group` for what a sequence has in one of the pools of its `origin`.

        Returns:
          Those that have to move; None, and nothing is changed, if pages lack.
        """
        old, length = int(self.group[sequence]), int(self.table.length[sequence])
        filled = self.of(sequence)[: num_pages_for(length - 1, self.page_size)].copy()
        adopted = self.pools[group].adopt(filled, origin[old], moved[old, group])
        if adopted is None:
            return None
        pages, num_found = adopted
        self.give(sequence, group, pages)
        return Move(old, filled[num_found:], group, pages[num_found:])

    def holds(self, moves: PageMoves) -> list[np.ndarray]:
        """Which of `moves`, all that arrives in new pools, bring the pages of each that has some."""
        number = np.zeros((len(self.pools), self.pools[0].num_pages), np.int64)
        number[moves.new_group, moves.new_page] = np.arange(len(moves.new_page))
        held = np.flatnonzero(self.count).tolist()
        return [number[self.group[i], self.of(i)] for i in held]

    def renumber(self, moves: PageMoves, new_page: np.ndarray) -> None:
        """Pages of pools in which nothing but `moves` has arrived lie at `new_page`, int[moves]."""
        number = np.zeros((len(self.pools), self.pools[0].num_pages), np.int32)
        number[moves.new_group, moves.new_page] = new_page
        for group, pool in enumerate(self.pools):
            mine = moves.new_group == group
            pool.renumber(moves.new_page[mine], new_page[mine])
        held, most = np.flatnonzero(self.count), int(self.count.max(initial=0))
        self.pages[held, :most] = number[self.group[held][:, None], self.pages[held, :most]]

    def check_integrity(self) -> None:
        """When no burst is on its way.

        Raises:
          AssertionError: pools and tables contradict each other.
        """
        is_live = np.zeros(len(self.table), bool)
        is_live[self.table.live] = True
        assert not self.count[~is_live].any(), "a sequence that is not live holds pages"
        assert np.array_equal((self.pages != NULL_PAGE).sum(axis=1), self.count)
        filled = -(-(self.table.length - 1) // self.page_size)
        assert (self.count[is_live] >= filled[is_live]).all(), "a token has no page"
        assert (self.table.group(self.table.live) == self.group[self.table.live]).all()
        for group, pool in enumerate(self.pools):
            mine = is_live & (self.group == group)
            held = self.pages[mine]
            holders = np.bincount(held[held != NULL_PAGE], minlength=pool.num_pages)
            pool.check_integrity(holders)
        for i in self.table.live.tolist():
            pages, pool = self.of(i).tolist(), self.pools[self.group[i]]
            for before, page in zip([NULL_PAGE, *pages], pages, strict=False):
                assert pool.prefixes.follows(page, before), (
                    "a page is found behind another than it lies behind"
                )


def turns(counts: np.ndarray) -> np.ndarray:
    """0 … count - 1 for each of `counts`, one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
