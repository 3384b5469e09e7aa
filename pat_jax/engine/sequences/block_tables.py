"""Block tables: the pages that each sequence holds in the pool of its replica. All on the host.

The cache manager decides which sequences get pages and which give them back.
"""

from collections.abc import Iterator

import numpy as np

from pat_jax.engine.sequences.page_allocator import NULL_PAGE, PageAllocator, num_pages_for
from pat_jax.engine.sequences.prefill_calls import PageMoves, PrefillCall, Spans, prefill_calls
from pat_jax.engine.sequences.sequence_table import NO_SEQUENCE, SequenceTable
from pat_jax.layout.buckets import Buckets

NO_REPLICA = -1


class Moved(dict[tuple[int, int], np.ndarray]):
    """By old and new replica: each page's new number, int32[pages], or NULL_PAGE if not moved."""

    def __init__(self, num_pages: int):
        super().__init__()
        self.num_pages = num_pages

    def __missing__(self, replicas: tuple[int, int]) -> np.ndarray:
        self[replicas] = np.full(self.num_pages, NULL_PAGE, np.int32)
        return self[replicas]


def pages_with(table: SequenceTable, tokens: int, page_size: int) -> np.ndarray:
    """Returns how many pages each running sequence needs with `tokens` more tokens, int[running].

    Pages that it already has are included. Tokens beyond its limit do not count."""
    running = table.running
    most = np.minimum(table.length[running] - 1 + tokens, table.end[running] - 1)
    return -(-most // page_size)


class BlockTables:
    """The pages of a table's sequences; each replica has a pool of pages."""

    def __init__(self, table: SequenceTable, *, num_pages: int, page_size: int):
        """
        Args:
          num_pages: pages of each replica's pool; enough for the longest sequence alone.
        """
        self.table = table
        self.page_size = page_size
        self.pools = self.new_pools(table.num_replicas, num_pages)
        most = num_pages_for(int(table.end.max(initial=1)) - 1, page_size)
        # Pages of each sequence in order of position, NULL_PAGE after the last, and their number.
        # Most of the array is never touched, and zeroed memory is not allocated until it is.
        assert NULL_PAGE == 0
        self.pages = np.zeros((len(table), most), np.int32)
        self.count = np.zeros(len(table), np.int64)
        self.replica = np.full(len(table), NO_REPLICA, np.int64)  # whose pool has or had the pages

    def new_pools(self, num_replicas: int, num_pages: int) -> list[PageAllocator]:
        """Returns empty pools. Raises ValueError if one cannot hold the longest sequence."""
        longest = int(self.table.end.max(initial=1)) - 1
        if num_pages_for(longest, self.page_size) >= num_pages:
            raise ValueError(
                f"a pool of {num_pages} pages of {self.page_size} tokens does not hold a sequence "
                f"of {longest} tokens."
            )
        return [PageAllocator(num_pages, self.page_size) for _ in range(num_replicas)]

    @property
    def free(self) -> np.ndarray:
        """The number of free pages of each replica, int[replicas]."""
        return np.array([pool.num_free for pool in self.pools], np.int64)

    @property
    def num_held(self) -> int:
        """The number of pages of all replicas that are held or reserved, each counted once."""
        return sum(pool.capacity - pool.num_free for pool in self.pools)

    @property
    def unused(self) -> int:
        """The number of tokens that the running sequences' pages still have room for."""
        running = self.table.running
        return int((self.count[running] * self.page_size - (self.table.length[running] - 1)).sum())

    def of(self, sequence: int) -> np.ndarray:
        """Returns the pages of a sequence, int32[pages]; not a copy."""
        return self.pages[sequence, : self.count[sequence]]

    def rows(self, sequences: np.ndarray, width: int) -> np.ndarray:
        """Returns sequences' first pages, int32[sequences, width]; NULL_PAGE past the last.

        Args:
          sequences: int[sequences]; the row of NO_SEQUENCE is all NULL_PAGE.
          width: pages per row. Decoding needs all pages of a sequence, a prefill only those of its
            context.
        """
        rows = np.full((len(sequences), width), NULL_PAGE, np.int32)
        is_there = sequences != NO_SEQUENCE
        pages = self.pages[sequences[is_there], :width]
        rows[is_there, : pages.shape[1]] = pages
        return rows

    def prefills(
        self, spans: Spans, known: np.ndarray, sizes: tuple[int, int], buckets: Buckets
    ) -> Iterator[tuple[PrefillCall, int, tuple[np.ndarray, np.ndarray, np.ndarray]]]:
        """Yields prefill calls (`prefill_calls`), their length buckets and program arguments.

        Args:
          known: int[sequences, tokens], the tokens of each sequence.
          sizes: see `prefill_calls`.
        """
        size = self.page_size
        dp = len(self.pools)
        for call in prefill_calls(spans, num_replicas=dp, sizes=sizes, page_size=size):
            length = buckets.length_for(call.context)
            sequence, start = call.sequence.reshape(-1), call.start.reshape(-1)
            rows = self.rows(sequence, num_pages_for(length, size))
            yield call, length, (call.tokens(known, size), start, rows)

    def lacking(self, steps: int) -> np.ndarray:
        """Returns how many pages each replica lacks for `steps` more tokens per row."""
        running = self.table.running
        more = self._missing(steps)
        return np.bincount(self.replica[running], more, minlength=len(self.pools)).astype(np.int64)

    def _missing(self, steps: int) -> np.ndarray:
        """How many pages each running sequence lacks for `steps` more tokens, int[running]."""
        needed = pages_with(self.table, steps, self.page_size)
        return np.maximum(needed - self.count[self.table.running], 0)

    def extend(self, steps: int) -> None:
        """Gives every running sequence pages for `steps` more tokens; enough pages must be free."""
        running = self.table.running
        more = self._missing(steps)
        replica = self.replica[running]
        for g in np.unique(replica[more > 0]).tolist():
            mine = running[replica == g]
            counts = more[replica == g]
            taken = self.pools[g].take(int(counts.sum()))
            assert taken is not None, "there is room for more"
            self._append(np.repeat(mine, counts), turns(counts), taken)
            self.count[mine] += counts

    def add(self, drawn: np.ndarray) -> np.ndarray:
        """Adds the pages that rows took during a burst; call it before `SequenceTable.advance`.

        Args:
          drawn: int32[rows, most], the pages that each row took, NULL_PAGE after the last. If the
            row's sequence was ended during the burst, they are released.

        Returns:
          int[replicas], the number of pages taken in each replica.
        """
        row_to_sequence = self.table.row_to_sequence
        counts = (drawn != NULL_PAGE).sum(axis=1)
        row = np.repeat(np.arange(len(counts)), counts)
        turn = turns(counts)
        sequence = row_to_sequence[row]
        pages = drawn[row, turn]
        is_kept = sequence != NO_SEQUENCE
        self._append(sequence[is_kept], turn[is_kept], pages[is_kept])
        at = np.flatnonzero(row_to_sequence != NO_SEQUENCE)
        self.count[row_to_sequence[at]] += counts[at]
        replica = row // self.table.rows_per_replica
        for g in np.unique(replica[~is_kept]).tolist():
            self.pools[g].release(pages[~is_kept & (replica == g)])
        return np.bincount(replica, minlength=len(self.pools))

    def _append(self, sequence: np.ndarray, turn: np.ndarray, pages: np.ndarray) -> None:
        """Appends `pages[k]` to sequence `sequence[k]` as its new page with index `turn[k]`."""
        self.pages[sequence, self.count[sequence] + turn] = pages

    def give(self, sequence: int, replica: int, pages: np.ndarray) -> None:
        """Sets all pages of a sequence, which are in the pool of `replica`."""
        self.pages[sequence, len(pages) : self.count[sequence]] = NULL_PAGE
        self.pages[sequence, : len(pages)] = pages
        self.count[sequence] = len(pages)
        self.replica[sequence] = replica

    def forget(self, sequences: np.ndarray) -> None:
        """Empties the tables of sequences without releasing pages, because the pages were released
        before or their pool is gone."""
        most = int(self.count[sequences].max(initial=0))
        self.pages[sequences, :most] = NULL_PAGE
        self.count[sequences] = 0

    def release(self, sequences: np.ndarray) -> None:
        """Releases the pages of sequences; pages that other sequences hold too stay held."""
        for replica in np.unique(self.replica[sequences]).tolist():
            mine = sequences[self.replica[sequences] == replica]
            self.pools[replica].release(*(self.of(i) for i in mine.tolist()))
        self.forget(sequences)

    def adopt(
        self, sequence: int, replica: int, origin: list[PageAllocator], moved: Moved
    ) -> PageMoves | None:
        """Gives a sequence pages in `replica`, to which its pages in the pools `origin` will move.

        Args:
          moved: the pages to which pages of `origin` have moved so far; updated.

        Returns:
          The moves of pages; None, without any change, if too few pages are free.
        """
        old = int(self.replica[sequence])
        length = int(self.table.length[sequence])
        filled = self.of(sequence)[: num_pages_for(length - 1, self.page_size)].copy()
        adopted = self.pools[replica].adopt(filled, origin[old], moved[old, replica])
        if adopted is None:
            return None
        pages, num_found = adopted
        self.give(sequence, replica, pages)
        old_page, new_page = filled[num_found:], pages[num_found:]
        count = len(old_page)
        return PageMoves(np.full(count, old), old_page, np.full(count, replica), new_page)

    def holds(self, moves: PageMoves) -> list[np.ndarray]:
        """Returns for each sequence the indices of the moves that bring its pages.

        Args:
          moves: all moves into the new pools.
        """
        number = np.zeros((len(self.pools), self.pools[0].num_pages), np.int64)
        number[moves.new_replica, moves.new_page] = np.arange(len(moves.new_page))
        held = np.flatnonzero(self.count).tolist()
        return [number[self.replica[i], self.of(i)] for i in held]

    def renumber(self, moves: PageMoves, new_page: np.ndarray) -> None:
        """Renumbers the pages of new pools, which hold nothing but the pages of `moves`.

        Args:
          new_page: int[moves], the page in which each move arrived.
        """
        number = np.zeros((len(self.pools), self.pools[0].num_pages), np.int32)
        number[moves.new_replica, moves.new_page] = new_page
        for replica, pool in enumerate(self.pools):
            mine = moves.new_replica == replica
            pool.renumber(moves.new_page[mine], new_page[mine])
        held = np.flatnonzero(self.count)
        most = int(self.count.max(initial=0))
        self.pages[held, :most] = number[self.replica[held][:, None], self.pages[held, :most]]

    def check_integrity(self) -> None:
        """Raises AssertionError if pools and tables disagree. No burst may be running."""
        is_running = np.zeros(len(self.table), bool)
        is_running[self.table.running] = True
        assert not self.count[~is_running].any(), "a sequence that is not running holds pages"
        assert np.array_equal((self.pages != NULL_PAGE).sum(axis=1), self.count)
        filled = -(-(self.table.length - 1) // self.page_size)
        assert (self.count[is_running] >= filled[is_running]).all(), "a token has no page"
        assert (self.table.replica(self.table.running) == self.replica[self.table.running]).all()
        for replica, pool in enumerate(self.pools):
            mine = is_running & (self.replica == replica)
            held = self.pages[mine]
            holders = np.bincount(held[held != NULL_PAGE], minlength=pool.num_pages)
            pool.check_integrity(holders)
        for i in self.table.running.tolist():
            pages = self.of(i).tolist()
            pool = self.pools[self.replica[i]]
            for before, page in zip([NULL_PAGE, *pages], pages, strict=False):
                assert pool.prefixes.follows(page, before), (
                    "a page is found behind another than it lies behind"
                )


def turns(counts: np.ndarray) -> np.ndarray:
    """Returns 0 … count - 1 for each count, concatenated: [2, 3] gives [0, 1, 0, 1, 2]."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
