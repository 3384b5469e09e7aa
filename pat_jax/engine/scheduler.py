"""The scheduler: which sequences get a row and pages, which wait, and which give them back.

Before each burst: `grow`, then `admit`; after it `add`, for what rows drew during the burst, and
`release_ended`. In a switch: `carry`; in between `balance`. All on the host. The devices do what a
`PrefillWork` says before they decode.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pat_jax.engine.relocation.order import Pools, placed
from pat_jax.engine.relocation.rounds import Shipment
from pat_jax.engine.sequences.balance import options
from pat_jax.engine.sequences.block_tables import NO_GROUP, BlockTables, Moved
from pat_jax.engine.sequences.page_allocator import NO_PAGES, NULL_PAGE, Admitted, num_pages_for
from pat_jax.engine.sequences.prefill_calls import Copies, PageMoves, Spans
from pat_jax.engine.sequences.sequence_table import SequenceTable


class PrefillWork(NamedTuple):
    """What is to be computed before the next burst: all spans, then the copies."""

    spans: Spans
    copies: Copies


class Scheduler(BlockTables):
    """Decides which sequences of a table have a row and pages.

    Of those that wait, who had to make room comes first, then who is expected to run longest.
    """

    def __init__(
        self,
        table: SequenceTable,
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
        super().__init__(table, num_pages=num_pages, page_size=page_size)
        count = len(table.requests)
        order = np.arange(count) if expected is None else np.argsort(-expected, kind="stable")
        self._queue = deque(order.tolist())
        self._turn = np.zeros(count, np.int64)  # largest for who was admitted last
        self._num_admitted = 0

    def grow(self, steps: int, *, at_once: int) -> int:
        """Room for the next `steps` tokens of every live sequence, and pages for those `at_once`.

        Where pages are too few, the youngest of the group give up their own and their rows, and wait.
        Returns how many.
        """
        num_preempted, lacking = 0, self.lacking(steps)
        for group, pool in enumerate(self.pools):
            while lacking[group] > pool.num_free:
                self._preempt(self._youngest(group))
                num_preempted, lacking = num_preempted + 1, self.lacking(steps)
        live, tokens, pages = self._wanted(at_once)
        is_short = pages > self._num_pages[live]
        for i, num_tokens in zip(live[is_short].tolist(), tokens[is_short].tolist(), strict=True):
            more = self.pools[self._group[i]].extend(self._pages[i], num_tokens)
            assert more is not None, "there is room for more"
            self._pages[i], self._num_pages[i] = more, len(more)
        return num_preempted

    def _youngest(self, group: int) -> int:
        live = self.table.live
        members = live[self._group[live] == group]
        return int(members[self._turn[members].argmax()])

    def _preempt(self, sequence: int) -> None:
        self._release(sequence)
        self.table.leave(np.array([sequence]))
        self._queue.appendleft(sequence)

    def admit(self, rows_per_group: int, steps: int, *, at_once: int) -> PrefillWork:
        """Fills free rows from the queue as long as all that are live then have pages for `steps`.

        Given are those for the next tokens, `at_once`. Groups are kept even, and samples of a prompt
        together as far as that allows. If anybody waits, all rows are dealt out anew,
        `rows_per_group` to each group.
        """
        if not self._queue:
            return self._round([])
        table = self.table
        table.compact(rows_per_group)
        even = -(-int((~table.is_done).sum()) // table.num_groups)
        filling = _Filling(self, min(rows_per_group, even), steps, at_once)
        late = []
        while self._queue and filling.open:
            i = self._queue.popleft()
            if table.is_done[i]:
                continue  # what it had said before it gave way turned out to be the end
            home = self._home[self._prompt[i]]
            if not filling.take(i, filling.open if home == NO_GROUP else filling.open & {home}):
                late.append(i)
        # A row that nobody else wants is not left empty for the sake of a shared prefix.
        late = [i for i in late if not filling.take(i, filling.open)]
        self._queue.extendleft(reversed(late))
        sequences = np.array([i for i, _ in filling.admitted], np.int64)
        table.enter(sequences, self._group[sequences])
        return self._round(filling.admitted)

    def admit_one(
        self, sequence: int, group: int, steps: int, *, leaving: int = 0
    ) -> Admitted | None:
        """Pages for what is known of a sequence and `steps` more; None if there are too few.

        Args:
          leaving: pages that are to be free then.
        """
        table, i = self.table, sequence
        known, room = table.tokens[i, : table.length[i]], self._room(i, steps)
        admitted = self.pools[group].admit(known, room, leaving=leaving)
        if admitted is not None:
            self._take(i, group, admitted.pages)
            self._turn[i] = self._num_admitted = self._num_admitted + 1
        return admitted

    def more_pages(self, sequence: int, steps: int, *, after: int) -> int:
        """Pages that a sequence needs for `steps` tokens and not yet for those `after` which they end."""
        cached = int(self.table.length[sequence]) - 1
        now, then = (cached + self._room(sequence, n) for n in (after, steps))
        return num_pages_for(then, self.page_size) - num_pages_for(now, self.page_size)

    def _room(self, sequence: int, steps: int) -> int:
        return min(steps, int(self.table.end[sequence] - self.table.length[sequence]))

    def release_ended(self) -> Copies:
        """The pages of sequences that are done are free again.

        Those with a NaN are to be written over, as the copies say: attention multiplies what it does
        not see by zero, and a NaN stays one.
        """
        spoilt = []
        for i in np.flatnonzero(self.table.is_done & (self._num_pages > 0)).tolist():
            if self.table.has_failed(i):
                group = int(self._group[i])
                freed = self.pools[group].discard(self._pages[i])
                spoilt += [(group, NULL_PAGE, page) for page in freed.tolist()]
                self._pages[i], self._num_pages[i] = NO_PAGES, 0
            else:
                self._release(i)
        return Copies(*np.array(spoilt, np.int32).reshape(-1, 3).T)

    def wipe(self, group: int) -> Copies:
        """All free pages of a group are to be written over: there may be a NaN in any of them."""
        self.pools[group].forget_prefixes()
        pages = self.pools[group].blank
        return Copies(np.full_like(pages, group), np.full_like(pages, NULL_PAGE), pages)

    def carry(
        self, num_groups: int, *, num_pages: int, is_recomputed: np.ndarray, steps: int
    ) -> tuple[Copies, list[Shipment], PrefillWork]:
        """Rows and pages of the live sequences in the groups, and the pools, of another layout.

        The new pools take the memory of the old ones: see `relocation/order.py`. Rows are dealt out anew, as few
        as hold the fullest group. A sequence that finds too few pages waits.

        Args:
          num_pages: of each new pool.
          is_recomputed: bool[live], whose pages are left behind.
          steps: who is computed anew has pages for so many tokens more.

        Returns:
          What is to be copied in the old pools, then moved, in this order, then computed.
        """
        table = self.table
        live, old_pools = table.live, self.pools
        for i in live[is_recomputed].tolist():
            self._release(i)
        group = table.regroup(num_groups, is_recomputed)
        self.pools = self._new_pools(num_groups, num_pages)
        self._home = [NO_GROUP] * len(self._home)
        moved: Moved = defaultdict(dict)
        moves, admitted, is_left = [], [], is_recomputed.copy()
        by_age = np.argsort(self._turn[live])
        for k in by_age[~is_recomputed[by_age]].tolist():
            adopted = self._adopt(int(live[k]), int(group[k]), old_pools, moved)
            is_left[k] = adopted is None
            moves += adopted or []
        old, new = (Pools(len(pools), pools[0].num_pages) for pools in (old_pools, self.pools))
        arrivals = placed(PageMoves.of(moves), old, new)
        self._renumber(live[~is_left], PageMoves.of(moves), arrivals.new_page)
        # A sequence that found too few is recomputed as well, if it shares enough with others, or waits.
        for k in by_age[is_left[by_age]].tolist():
            i, new = int(live[k]), int(group[k])
            if (given := self.admit_one(i, new, steps)) is not None:
                admitted.append((i, given))
                is_left[k] = False
        left = live[is_left]
        for i in left[np.argsort(-self._turn[left])].tolist():
            self._pages[i], self._num_pages[i] = NO_PAGES, 0
            self._queue.appendleft(i)
        table.leave(left)
        rows = int(np.bincount(group[~is_left], minlength=1).max())
        table.seat(group[~is_left], num_groups=num_groups, rows_per_group=rows)
        return arrivals.copies, arrivals.shipments, self._round(admitted)

    def balance_options(
        self, row_buckets: Sequence[int], laid_out: np.ndarray | int
    ) -> list[np.ndarray]:
        """The groups in which the live sequences could be, int[live] each: see `balance.options`.

        Args:
          laid_out: pages of each group that will be free as well, int[groups].
        """
        free = np.array([pool.num_free for pool in self.pools]) + laid_out
        pages = self._num_pages[self.table.live]
        return options(self.table, pages, free, row_buckets)

    def balance(self, group: np.ndarray) -> PageMoves:
        """Live sequences to their `group` of the same layout, int[live]; rows are dealt out anew.

        A sequence that finds too few pages there for all that it has stays. No group may both give sequences away
        and get some: what arrives would lie in what has not left yet.
        """
        table, group = self.table, group.copy()
        live, moved, moves = table.live, defaultdict(dict), []
        old = self._group[live]
        assert not set(old[old != group]) & set(group[old != group])
        for k in np.flatnonzero(old != group).tolist():
            i, pool, held = int(live[k]), self.pools[group[k]], self._pages[live[k]]
            if pool.num_free < len(held):
                group[k] = old[k]
                continue
            adopted = self._adopt(i, int(group[k]), self.pools, moved)
            pages = pool.extend(self._pages[i], len(held) * self.page_size)
            assert adopted is not None and pages is not None
            self._take(i, int(group[k]), pages)
            self.pools[old[k]].release(held)
            moves += adopted
        rows = int(np.bincount(group).max())
        table.seat(group, num_groups=len(self.pools), rows_per_group=rows)
        return PageMoves.of(moves)

    def _round(self, admitted: list[tuple[int, Admitted]]) -> PrefillWork:
        i = np.array([i for i, _ in admitted], np.int64)
        start = np.array([given.num_cached for _, given in admitted], np.int64)
        stop = self.table.length[i] - 1
        is_new = start < stop
        spans = Spans(i[is_new], self._group[i][is_new], start[is_new], stop[is_new])
        copies = [(self._group[i], *given.copy) for i, given in admitted if given.copy is not None]
        return PrefillWork(spans, Copies(*np.array(copies, np.int32).reshape(-1, 3).T))


class _Filling:
    """One round of admissions: which groups have room left, and who was admitted."""

    def __init__(self, scheduler: Scheduler, most: int, steps: int, at_once: int):
        """At most `most` live sequences to a group; `steps` and `at_once` as in `Scheduler.admit`."""
        table = scheduler.table
        live = table.group(table.live)
        self.scheduler, self.most, self.steps, self.at_once = scheduler, most, steps, at_once
        self.needed = scheduler.lacking(steps)  # of each group, pages that are to be free
        self.count = np.bincount(live, minlength=table.num_groups).tolist()
        self.open = {g for g, count in enumerate(self.count) if count < most}
        self.admitted: list[tuple[int, Admitted]] = []

    def take(self, sequence: int, groups: set[int]) -> bool:
        """Admits it to the one of some open groups that has most pages left, if it has enough."""
        pools, needed = self.scheduler.pools, self.needed
        later = self.scheduler.more_pages(sequence, self.steps, after=self.at_once)
        for group in sorted(groups, key=lambda g: needed[g] - pools[g].num_free):
            leaving = int(needed[group]) + later
            given = self.scheduler.admit_one(sequence, group, self.at_once, leaving=leaving)
            if given is None:
                # Nobody overtakes who needs more pages.
                self.open.discard(group)
                continue
            self.admitted.append((sequence, given))
            needed[group] = leaving
            self.count[group] += 1
            if self.count[group] == self.most:
                self.open.discard(group)
            return True
        return False
