"""The cache manager: decides on the host which sequences get a row and pages, and which wait.

Call `grow`, then `admit` before each burst and `release_ended` after it. A switch calls `leave`,
then `arrive`; a move to other replicas of the same layout calls `balance`, then `arrive`.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from pat_jax.engine.admissions import Admissions, Filling
from pat_jax.engine.sequences.block_tables import NO_REPLICA, BlockTables, Moved
from pat_jax.engine.sequences.contents import Contents
from pat_jax.engine.sequences.page_allocator import NULL_PAGE
from pat_jax.engine.sequences.prefill_calls import Copies, PageMoves, PrefillWork
from pat_jax.engine.sequences.sequence_table import options


class CacheManager:
    """Decides which sequences of a table have a row and pages.

    Among waiting sequences, preempted ones come first, then those expected to run longest.
    """

    def __init__(
        self,
        contents: Contents,
        *,
        num_pages: int,
        page_size: int,
        expected: np.ndarray | None = None,
    ):
        """
        Args:
          num_pages: pages of each replica's pool; enough for the longest sequence alone.
          expected: float[sequences], the predicted length of each response in tokens; None keeps
            the order of the requests.
        """
        self.contents = contents
        self.table = contents.table
        self.tables = BlockTables(self.table, num_pages=num_pages, page_size=page_size)
        count = len(self.table)
        order = np.arange(count) if expected is None else np.argsort(-expected, kind="stable")
        self._queue = deque(order.tolist())
        self.admissions = Admissions(contents, self.tables)

    def grow(self, steps: int, *, at_once: int) -> int:
        """Makes sure that pages are free for `steps` more tokens of every running sequence.

        A replica with too few pages preempts its most recently admitted sequences. Pages for the
        first `at_once` tokens are handed out now. Returns the number of preempted sequences.
        """
        tables = self.tables
        num_preempted = 0
        lacking = tables.lacking(steps)
        for replica, pool in enumerate(tables.pools):
            while lacking[replica] > pool.num_free:
                self._preempt(self._youngest(replica))
                num_preempted = num_preempted + 1
                lacking = tables.lacking(steps)
        tables.extend(at_once)
        return num_preempted

    def _youngest(self, replica: int) -> int:
        running = self.table.running
        members = running[self.tables.replica[running] == replica]
        return int(members[self.admissions.turn[members].argmax()])

    def _preempt(self, sequence: int) -> None:
        """Takes a sequence's row and pages; when it resumes, it reuses those not overwritten."""
        tables = self.tables
        known = self.contents.known(sequence)
        if known is not None:
            tables.pools[tables.replica[sequence]].index(known, tables.of(sequence))
        tables.release(np.array([sequence]))
        self.table.remove(np.array([sequence]))
        self._queue.appendleft(sequence)

    def admit(self, rows_per_replica: int, steps: int, *, at_once: int) -> PrefillWork:
        """Gives free rows to waiting sequences while pages are free for `steps` tokens of each.

        It hands out only the pages for each sequence's first `at_once` tokens. Replicas get equally
        many sequences. As far as that allows, samples of a prompt share a replica. If any sequence
        waits, all rows are reassigned, `rows_per_replica` to each replica.
        """
        if not self._queue:
            return self.admissions.work([])
        table = self.table
        table.compact(rows_per_replica)
        even = -(-int((~table.is_done).sum()) // table.num_replicas)
        filling = Filling(self.admissions, min(rows_per_replica, even), steps, at_once)
        late = []
        while self._queue and filling.open:
            i = self._queue.popleft()
            prefix_replica = self.admissions.prefix_replica(i)
            if not filling.take(
                i, filling.open if prefix_replica == NO_REPLICA else filling.open & {prefix_replica}
            ):
                late.append(i)
        # Rows that are still free take sequences whose prefix is in another replica.
        late = [i for i in late if not filling.take(i, filling.open)]
        self._queue.extendleft(reversed(late))
        sequences = np.array([i for i, _ in filling.admitted], np.int64)
        table.add(sequences, self.tables.replica[sequences])
        return self.admissions.work(filling.admitted)

    def release_ended(self) -> Copies:
        """Frees the pages of finished sequences; returns copies to overwrite those of failed ones.

        These may hold NaN. Attention multiplies masked values by zero, and NaN times zero is NaN.
        """
        tables = self.tables
        poisoned = []
        ended = np.flatnonzero(self.table.is_done & (tables.count > 0))
        has_failed = np.array([self.contents.has_failed(i) for i in ended.tolist()], bool)
        tables.release(ended[~has_failed])
        for i in ended[has_failed].tolist():
            replica = int(tables.replica[i])
            freed = tables.pools[replica].discard(tables.of(i))
            poisoned += [(replica, NULL_PAGE, page) for page in freed.tolist()]
        tables.forget(ended[has_failed])
        replicas, sources, targets = np.array(poisoned, np.int32).reshape(-1, 3).T
        return Copies(replicas, sources, targets)

    def scrub(self, replica: int) -> Copies:
        """Returns copies of the null page onto all free pages of a replica, because these may hold
        NaN."""
        pool = self.tables.pools[replica]
        pool.forget_prefixes()
        pages = pool.blank
        return Copies(np.full_like(pages, replica), np.full_like(pages, NULL_PAGE), pages)

    def leave(
        self, replica: np.ndarray, *, num_replicas: int, num_pages: int, is_recomputed: np.ndarray
    ) -> tuple[PageMoves, np.ndarray]:
        """Does the first half of a switch: assigns pages in the new pools; `arrive` must follow.

        Sequences that were admitted first get pages first.

        Args:
          replica: int[running], each sequence's replica in the new layout.
          num_pages: pages of each new pool.
          is_recomputed: bool[running], sequences whose pages are left behind.

        Returns:
          The moves of pages, and which sequences leave their pages behind, bool[running]. Among
          these are sequences for which the new pools have too few pages.
        """
        running = self.table.running
        tables = self.tables
        tables.release(running[is_recomputed])
        old_pools = tables.pools
        tables.pools = tables.new_pools(num_replicas, num_pages)
        self.admissions.forget_prefix_replicas()
        moved = Moved(old_pools[0].num_pages)
        moves = []
        is_left = is_recomputed.copy()
        by_age = np.argsort(self.admissions.turn[running])
        for k in by_age[~is_recomputed[by_age]].tolist():
            i = int(running[k])
            adopted = tables.adopt(i, int(replica[k]), old_pools, moved)
            if adopted is None:
                is_left[k] = True
            else:
                moves.append(adopted)
                self.admissions.note_prefix_replica(i, int(replica[k]))
        tables.forget(running[is_left])
        return PageMoves.joined(moves), is_left

    def settle(self, moves: PageMoves, new_page: np.ndarray) -> np.ndarray:
        """Records where the moved pages arrived on the devices.

        Args:
          new_page: int[moves], the page in which each move arrived; NULL_PAGE if it found no room.

        Returns:
          Which sequences had a page that found no room, bool[running]. They hold no pages now.
        """
        tables = self.tables
        running = self.table.running
        stays = new_page == NULL_PAGE
        is_lost = np.zeros((len(tables.pools), tables.pools[0].num_pages), bool)
        is_lost[moves.new_replica[stays], moves.new_page[stays]] = True
        is_left = np.zeros(len(running), bool)
        for k in np.flatnonzero(tables.count[running]).tolist() if stays.any() else ():
            pages = tables.of(int(running[k]))
            replica = tables.replica[running[k]]
            if is_lost[replica, pages].any():
                tables.pools[replica].discard(pages)
                is_left[k] = True
        tables.forget(running[is_left])
        tables.renumber(moves.part(~stays), new_page[~stays])
        return is_left

    def arrive(
        self, replica: np.ndarray, is_left: np.ndarray, steps: int
    ) -> tuple[PrefillWork, np.ndarray]:
        """Does the second half of a move: gives pages to sequences that left theirs behind.

        These are recomputed, in the order of their admission. Each gets pages for `steps` more
        tokens, or waits if too few are free. All rows are reassigned: every replica gets as many
        rows as the fullest one needs.

        Args:
          replica: int[running], the new replica of each sequence.
          is_left: bool[running], sequences that `leave` and `settle` have left without pages.

        Returns:
          The prefill to run, and which sequences wait, bool[running].
        """
        table = self.table
        running = self.table.running
        waits = is_left.copy()
        admitted = []
        by_age = np.argsort(self.admissions.turn[running])
        for k in by_age[is_left[by_age]].tolist():
            i, new = int(running[k]), int(replica[k])
            if (given := self.admissions.admit(i, new, steps)) is not None:
                admitted.append((i, given))
                waits[k] = False
        left = running[waits]
        self._queue.extendleft(left[np.argsort(-self.admissions.turn[left])].tolist())
        table.remove(left)
        num_replicas = len(self.tables.pools)
        rows = int(np.bincount(replica[~waits], minlength=1).max())
        table.assign_rows(replica[~waits], num_replicas=num_replicas, rows_per_replica=rows)
        return self.admissions.work(admitted), waits

    def balance_options(
        self, row_buckets: Sequence[int], laid_out: np.ndarray | int
    ) -> list[np.ndarray]:
        """Returns the assignments of running sequences to replicas that the planner may choose.

        Each is int[running], the replica of every sequence; see `sequence_table.options`.

        Args:
          laid_out: int[replicas], pages reserved for the running bursts, which count as free.
        """
        tables = self.tables
        pages = tables.count[self.table.running]
        return options(self.table, pages, tables.free + laid_out, row_buckets)

    def balance(self, replica: np.ndarray) -> tuple[np.ndarray, PageMoves]:
        """Moves running sequences to other replicas of the same layout; `arrive` must follow.

        A sequence stays if its new replica has too few pages for it. No replica may both give and
        receive sequences: arriving pages could overwrite pages that have not left yet.

        Args:
          replica: int[running], the wanted replica of each sequence.

        Returns:
          The replica of each sequence after the move, int[running], and the moves of pages.
        """
        table = self.table
        tables = self.tables
        replica = replica.copy()
        running = table.running
        pools = tables.pools
        moved = Moved(pools[0].num_pages)
        moves = []
        old = tables.replica[running]
        assert not set(old[old != replica]) & set(replica[old != replica])
        for k in np.flatnonzero(old != replica).tolist():
            i = int(running[k])
            pool = pools[replica[k]]
            held = tables.of(i).copy()
            if pool.num_free < len(held):
                replica[k] = old[k]
                continue
            adopted = tables.adopt(i, int(replica[k]), pools, moved)
            more = pool.take(len(held) - int(tables.count[i]))
            assert adopted is not None and more is not None, "counted"
            self.admissions.give(i, int(replica[k]), np.concatenate([tables.of(i), more]))
            pools[old[k]].release(held)
            moves.append(adopted)
        return replica, PageMoves.joined(moves)

    def check_integrity(self) -> None:
        """Raises AssertionError if rows, pages and queue disagree. No burst may be running."""
        self.table.check_integrity()
        self.tables.check_integrity()
        assert sorted(self._queue) == self.table.waiting.tolist(), "the queue is those that wait"
