"""The cache manager: which sequences get a row and pages, which wait, and which give them back.

Before each burst: `grow`, then `admit`; after it `release_ended`. In a switch: `leave`, then
`arrive`; in between `balance`. All on the host.
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

# With all samples of a prompt one after the other, the last one of the longest prompt would begin last of
# all: on recorded responses a rollout then has up to a third more steps.
LEADERS = 4


class CacheManager:
    """Decides which sequences of a table have a row and pages.

    Among those that wait, the ones that had to make room come first, then those expected to run
    longest. After `stagger` the first sample of each prompt comes first, then the second.
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
          num_pages: of each replica's pool; enough for the longest sequence alone.
          expected: float[sequences], tokens of the response; in order of submission where not
            given.
        """
        self.contents, self.table = contents, contents.table
        self.tables = BlockTables(self.table, num_pages=num_pages, page_size=page_size)
        count = len(self.table)
        order = np.arange(count) if expected is None else np.argsort(-expected, kind="stable")
        self._queue = deque(order.tolist())
        self.admissions = Admissions(contents, self.tables)

    @property
    def queue(self) -> np.ndarray:
        """int[waiting], sequences in the order in which they get rows."""
        return np.array(self._queue, np.int64)

    def stagger(self) -> None:
        """The first sample of each prompt gets a row first, then the second, up to so many
        `LEADERS`; the rest follow as before. Later samples then have finished siblings to draft
        from.
        """
        order = self.queue
        prompt = self.contents.prompt[order]
        by_prompt = np.argsort(prompt, kind="stable")
        rank = np.empty(len(order), np.int64)
        rank[by_prompt] = np.arange(len(order)) - np.searchsorted(
            prompt[by_prompt], prompt[by_prompt]
        )
        self._queue = deque(order[np.argsort(np.minimum(rank, LEADERS), kind="stable")].tolist())

    def grow(self, steps: int, *, at_once: int) -> int:
        """Room for the next `steps` tokens of every running sequence, pages for those `at_once`.

        Where pages are too few, the youngest of the replica give up their own and their rows, and
        wait. Returns how many.
        """
        tables, num_preempted = self.tables, 0
        lacking = tables.lacking(steps)
        for replica, pool in enumerate(tables.pools):
            while lacking[replica] > pool.num_free:
                self._preempt(self._youngest(replica))
                num_preempted, lacking = num_preempted + 1, tables.lacking(steps)
        tables.extend(at_once)
        return num_preempted

    def _youngest(self, replica: int) -> int:
        running = self.table.running
        members = running[self.tables.replica[running] == replica]
        return int(members[self.admissions.turn[members].argmax()])

    def _preempt(self, sequence: int) -> None:
        """Its pages can be found again as long as nobody else needs them."""
        tables, known = self.tables, self.contents.known(sequence)
        if known is not None:
            tables.pools[tables.replica[sequence]].index(known, tables.of(sequence))
        tables.release(np.array([sequence]))
        self.table.remove(np.array([sequence]))
        self._queue.appendleft(sequence)

    def admit(self, rows_per_replica: int, steps: int, *, at_once: int) -> PrefillWork:
        """Fills free rows from the queue while all that run then have pages for `steps`.

        Given are those for the next tokens, `at_once`. Replicas are kept even, and samples of a
        prompt together as far as that allows. If any sequence waits, all rows are dealt out anew,
        `rows_per_replica` to each replica.
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
        # A row that no other sequence wants is not left empty for the sake of a shared prefix.
        late = [i for i in late if not filling.take(i, filling.open)]
        self._queue.extendleft(reversed(late))
        sequences = np.array([i for i, _ in filling.admitted], np.int64)
        table.add(sequences, self.tables.replica[sequences])
        return self.admissions.work(filling.admitted)

    def release_ended(self) -> Copies:
        """The pages of sequences that are done are free again.

        Those with a NaN are to be written over, as the copies say: attention multiplies what it
        does not see by zero, and a NaN stays one.
        """
        tables, poisoned = self.tables, []
        ended = np.flatnonzero(self.table.is_done & (tables.count > 0))
        has_failed = np.array([self.contents.has_failed(i) for i in ended.tolist()], bool)
        tables.release(ended[~has_failed])
        for i in ended[has_failed].tolist():
            replica = int(tables.replica[i])
            freed = tables.pools[replica].discard(tables.of(i))
            poisoned += [(replica, NULL_PAGE, page) for page in freed.tolist()]
        tables.forget(ended[has_failed])
        return Copies(*np.array(poisoned, np.int32).reshape(-1, 3).T)

    def scrub(self, replica: int) -> Copies:
        """All free pages of a replica are to be written over: there may be a NaN in any of them."""
        pool = self.tables.pools[replica]
        pool.forget_prefixes()
        pages = pool.blank
        return Copies(np.full_like(pages, replica), np.full_like(pages, NULL_PAGE), pages)

    def leave(
        self, replica: np.ndarray, *, num_replicas: int, num_pages: int, is_recomputed: np.ndarray
    ) -> tuple[PageMoves, np.ndarray]:
        """The first half of a switch: pages for what migrates, in the pools of another layout.

        The oldest come first. `arrive` must follow.

        Args:
          replica: int[running], of each sequence there.
          num_pages: of each new pool.
          is_recomputed: bool[running], whose pages are left behind.

        Returns:
          Where pages go, and bool[running], the sequences whose pages are left behind: those that
          found too few as well.
        """
        running, tables = self.table.running, self.tables
        tables.release(running[is_recomputed])
        old_pools = tables.pools
        tables.pools = tables.new_pools(num_replicas, num_pages)
        self.admissions.forget_prefix_replicas()
        moved, moves = Moved(old_pools[0].num_pages), []
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
        """Pages have arrived at `new_page`, int[moves]; NULL_PAGE where one stayed behind.

        Returns:
          bool[running], sequences with such a page: they give back the others.
        """
        tables, running, stays = self.tables, self.table.running, new_page == NULL_PAGE
        is_lost = np.zeros((len(tables.pools), tables.pools[0].num_pages), bool)
        is_lost[moves.new_replica[stays], moves.new_page[stays]] = True
        is_left = np.zeros(len(running), bool)
        for k in np.flatnonzero(tables.count[running]).tolist() if stays.any() else ():
            pages, replica = tables.of(int(running[k])), tables.replica[running[k]]
            if is_lost[replica, pages].any():
                tables.pools[replica].discard(pages)
                is_left[k] = True
        tables.forget(running[is_left])
        tables.renumber(moves.part(~stays), new_page[~stays])
        return is_left

    def arrive(
        self, replica: np.ndarray, is_left: np.ndarray, steps: int
    ) -> tuple[PrefillWork, np.ndarray]:
        """The second half: what was left behind is computed anew, with pages for `steps` more.

        The oldest come first; a sequence that finds too few waits. Rows are dealt out anew, as few
        as hold the fullest replica.

        Args:
          replica: int[running], of each sequence.
          is_left: bool[running], as `leave` has it.

        Returns:
          What is to be computed, and bool[running], the sequences that wait.
        """
        table, running = self.table, self.table.running
        waits, admitted = is_left.copy(), []
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
        """Where the running sequences could be, int[running] each: see `sequence_table.options`.

        Args:
          laid_out: pages of each replica that will be free as well, int[replicas].
        """
        tables = self.tables
        pages = tables.count[self.table.running]
        return options(self.table, pages, tables.free + laid_out, row_buckets)

    def balance(self, replica: np.ndarray) -> tuple[np.ndarray, PageMoves]:
        """Pages in the `replica` of each running sequence, int[running]; `arrive` must follow.

        A sequence that finds too few pages there for all that it has stays. No replica may both
        give sequences away and get some: what arrives would lie in what has not left yet.

        Returns:
          Where sequences go, int[running], and their pages.
        """
        table, tables, replica = self.table, self.tables, replica.copy()
        running, pools = table.running, tables.pools
        moved, moves = Moved(pools[0].num_pages), []
        old = tables.replica[running]
        assert not set(old[old != replica]) & set(replica[old != replica])
        for k in np.flatnonzero(old != replica).tolist():
            i, pool = int(running[k]), pools[replica[k]]
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
        """To be called when no burst is on its way.

        Raises:
          AssertionError: rows, pages and the queue contradict each other.
        """
        self.table.check_integrity()
        self.tables.check_integrity()
        assert sorted(self._queue) == self.table.waiting.tolist(), "the queue is those that wait"
