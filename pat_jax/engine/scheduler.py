"""The scheduler: which sequences get a row and pages, which wait, and which give them back.

Before each burst: `grow`, then `admit`; after it `release_ended`. In a switch: `leave`, then `arrive`;
in between `balance`. All on the host.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from pat_jax.engine.admissions import Admissions, Filling
from pat_jax.engine.sequences.balance import options
from pat_jax.engine.sequences.block_tables import NO_GROUP, BlockTables, Moved
from pat_jax.engine.sequences.contents import Contents
from pat_jax.engine.sequences.page_allocator import NULL_PAGE
from pat_jax.engine.sequences.prefill_calls import Copies, PageMoves, PrefillWork

# With all samples of a prompt one after the other, the last one of the longest prompt would begin last of
# all: on recorded responses a rollout then has up to a third more steps.
LEADERS = 4


class Scheduler:
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
          num_pages: of each group's pool; enough for the longest sequence alone.
          expected: float[sequences], tokens of the response; in order of submission where not given.
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
        """The first sample of each prompt gets a row first, then the second, up to so many `LEADERS`; the rest
        follow as before. Later samples then have finished siblings to draft from.
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
        """Room for the next `steps` tokens of every live sequence, and pages for those `at_once`.

        Where pages are too few, the youngest of the group give up their own and their rows, and wait.
        Returns how many.
        """
        tables, num_preempted = self.tables, 0
        lacking = tables.lacking(steps)
        for group, pool in enumerate(tables.pools):
            while lacking[group] > pool.num_free:
                self._preempt(self._youngest(group))
                num_preempted, lacking = num_preempted + 1, tables.lacking(steps)
        tables.extend(at_once)
        return num_preempted

    def _youngest(self, group: int) -> int:
        live = self.table.live
        members = live[self.tables.group[live] == group]
        return int(members[self.admissions.turn[members].argmax()])

    def _preempt(self, sequence: int) -> None:
        """Its pages can be found again as long as nobody else needs them."""
        tables, known = self.tables, self.contents.known(sequence)
        if known is not None:
            tables.pools[tables.group[sequence]].index(known, tables.of(sequence))
        tables.release(np.array([sequence]))
        self.table.leave(np.array([sequence]))
        self._queue.appendleft(sequence)

    def admit(self, rows_per_group: int, steps: int, *, at_once: int) -> PrefillWork:
        """Fills free rows from the queue as long as all that are live then have pages for `steps`.

        Given are those for the next tokens, `at_once`. Groups are kept even, and samples of a prompt
        together as far as that allows. If any sequence waits, all rows are dealt out anew,
        `rows_per_group` to each group.
        """
        if not self._queue:
            return self.admissions.work([])
        table = self.table
        table.compact(rows_per_group)
        even = -(-int((~table.is_done).sum()) // table.num_groups)
        filling = Filling(self.admissions, min(rows_per_group, even), steps, at_once)
        late = []
        while self._queue and filling.open:
            i = self._queue.popleft()
            home = self.admissions.home(i)
            if not filling.take(i, filling.open if home == NO_GROUP else filling.open & {home}):
                late.append(i)
        # A row that no other sequence wants is not left empty for the sake of a shared prefix.
        late = [i for i in late if not filling.take(i, filling.open)]
        self._queue.extendleft(reversed(late))
        sequences = np.array([i for i, _ in filling.admitted], np.int64)
        table.enter(sequences, self.tables.group[sequences])
        return self.admissions.work(filling.admitted)

    def release_ended(self) -> Copies:
        """The pages of sequences that are done are free again.

        Those with a NaN are to be written over, as the copies say: attention multiplies what it does
        not see by zero, and a NaN stays one.
        """
        tables, spoilt = self.tables, []
        ended = np.flatnonzero(self.table.is_done & (tables.count > 0))
        has_failed = np.array([self.contents.has_failed(i) for i in ended.tolist()], bool)
        tables.release(ended[~has_failed])
        for i in ended[has_failed].tolist():
            group = int(tables.group[i])
            freed = tables.pools[group].discard(tables.of(i))
            spoilt += [(group, NULL_PAGE, page) for page in freed.tolist()]
        tables.forget(ended[has_failed])
        return Copies(*np.array(spoilt, np.int32).reshape(-1, 3).T)

    def wipe(self, group: int) -> Copies:
        """All free pages of a group are to be written over: there may be a NaN in any of them."""
        pool = self.tables.pools[group]
        pool.forget_prefixes()
        pages = pool.blank
        return Copies(np.full_like(pages, group), np.full_like(pages, NULL_PAGE), pages)

    def leave(
        self, group: np.ndarray, *, num_groups: int, num_pages: int, is_recomputed: np.ndarray
    ) -> tuple[PageMoves, np.ndarray]:
        """The first half of a switch: pages for what migrates, in the pools of another layout.

        The oldest come first. `arrive` must follow.

        Args:
          group: int[live], of each sequence there.
          num_pages: of each new pool.
          is_recomputed: bool[live], whose pages are left behind.

        Returns:
          Where pages go, and bool[live], the sequences whose pages are left behind: those that found
          too few as well.
        """
        live, tables = self.table.live, self.tables
        tables.release(live[is_recomputed])
        old_pools = tables.pools
        tables.pools = tables.new_pools(num_groups, num_pages)
        self.admissions.forget_homes()
        moved, moves = Moved(old_pools[0].num_pages), []
        is_left = is_recomputed.copy()
        by_age = np.argsort(self.admissions.turn[live])
        for k in by_age[~is_recomputed[by_age]].tolist():
            i = int(live[k])
            adopted = tables.adopt(i, int(group[k]), old_pools, moved)
            if adopted is None:
                is_left[k] = True
            else:
                moves.append(adopted)
                self.admissions.note_home(i, int(group[k]))
        tables.forget(live[is_left])
        return PageMoves.of(moves), is_left

    def settle(self, moves: PageMoves, new_page: np.ndarray) -> np.ndarray:
        """Pages have arrived at `new_page`, int[moves]; NULL_PAGE where one stayed behind.

        Returns:
          bool[live], sequences with such a page: they give back the others.
        """
        tables, live, stays = self.tables, self.table.live, new_page == NULL_PAGE
        is_lost = np.zeros((len(tables.pools), tables.pools[0].num_pages), bool)
        is_lost[moves.new_group[stays], moves.new_page[stays]] = True
        is_left = np.zeros(len(live), bool)
        for k in np.flatnonzero(tables.count[live]).tolist() if stays.any() else ():
            pages, group = tables.of(int(live[k])), tables.group[live[k]]
            if is_lost[group, pages].any():
                tables.pools[group].discard(pages)
                is_left[k] = True
        tables.forget(live[is_left])
        tables.renumber(moves.part(~stays), new_page[~stays])
        return is_left

    def arrive(
        self, group: np.ndarray, is_left: np.ndarray, steps: int
    ) -> tuple[PrefillWork, np.ndarray]:
        """The second half: what was left behind is computed anew, with pages for `steps` tokens more.

        The oldest come first; a sequence that finds too few waits. Rows are dealt out anew, as few as
        hold the fullest group.

        Args:
          group: int[live], of each sequence.
          is_left: bool[live], as `leave` has it.

        Returns:
          What is to be computed, and bool[live], the sequences that wait.
        """
        table, live = self.table, self.table.live
        waits, admitted = is_left.copy(), []
        by_age = np.argsort(self.admissions.turn[live])
        for k in by_age[is_left[by_age]].tolist():
            i, new = int(live[k]), int(group[k])
            if (given := self.admissions.admit(i, new, steps)) is not None:
                admitted.append((i, given))
                waits[k] = False
        left = live[waits]
        self._queue.extendleft(left[np.argsort(-self.admissions.turn[left])].tolist())
        table.leave(left)
        num_groups = len(self.tables.pools)
        rows = int(np.bincount(group[~waits], minlength=1).max())
        table.seat(group[~waits], num_groups=num_groups, rows_per_group=rows)
        return self.admissions.work(admitted), waits

    def balance_options(
        self, row_buckets: Sequence[int], laid_out: np.ndarray | int
    ) -> list[np.ndarray]:
        """The groups in which the live sequences could be, int[live] each: see `balance.options`.

        Args:
          laid_out: pages of each group that will be free as well, int[groups].
        """
        tables = self.tables
        pages = tables.count[self.table.live]
        return options(self.table, pages, tables.free + laid_out, row_buckets)

    def balance(self, group: np.ndarray) -> tuple[np.ndarray, PageMoves]:
        """Pages for live sequences in their `group` of the same layout, int[live]; `arrive` must follow.

        A sequence that finds too few pages there for all that it has stays. No group may both give
        sequences away and get some: what arrives would lie in what has not left yet.

        Returns:
          Where sequences go, int[live], and their pages.
        """
        table, tables, group = self.table, self.tables, group.copy()
        live, pools = table.live, tables.pools
        moved, moves = Moved(pools[0].num_pages), []
        old = tables.group[live]
        assert not set(old[old != group]) & set(group[old != group])
        for k in np.flatnonzero(old != group).tolist():
            i, pool = int(live[k]), pools[group[k]]
            held = tables.of(i).copy()
            if pool.num_free < len(held):
                group[k] = old[k]
                continue
            adopted = tables.adopt(i, int(group[k]), pools, moved)
            more = pool.take(len(held) - int(tables.count[i]))
            assert adopted is not None and more is not None, "counted"
            self.admissions.give(i, int(group[k]), np.concatenate([tables.of(i), more]))
            pools[old[k]].release(held)
            moves.append(adopted)
        return group, PageMoves.of(moves)

    def check_integrity(self) -> None:
        """To be called when no burst is on its way.

        Raises:
          AssertionError: rows, pages and the queue contradict each other.
        """
        self.table.check_integrity()
        self.tables.check_integrity()
        assert sorted(self._queue) == self.table.waiting.tolist(), "the queue is those that wait"
