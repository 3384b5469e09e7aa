"""Gives pages to sequences that begin or resume, and notes which replica last had each prompt."""

import numpy as np

from pat_jax.engine.sequences.block_tables import NO_REPLICA, BlockTables
from pat_jax.engine.sequences.contents import Contents
from pat_jax.engine.sequences.page_allocator import Admitted, num_pages_for
from pat_jax.engine.sequences.prefill_calls import Copies, PrefillWork, Spans


class Admissions:
    """Gives pages to sequences, one at a time. Does not know rows, nor which sequence is next."""

    def __init__(self, contents: Contents, tables: BlockTables):
        self.contents = contents
        self.table = contents.table
        self.tables = tables
        self.turn = np.zeros(len(self.table), np.int64)  # number of each sequence's last admission
        self._num_admitted = 0
        self.forget_prefix_replicas()

    def prefix_replica(self, sequence: int) -> int:
        """Returns the replica where a sample of the same prompt last got pages, or NO_REPLICA."""
        return int(self._prefix_replica[self.contents.prompt[sequence]])

    def note_prefix_replica(self, sequence: int, replica: int) -> None:
        self._prefix_replica[self.contents.prompt[sequence]] = replica

    def forget_prefix_replicas(self) -> None:
        self._prefix_replica = np.full(int(self.contents.prompt.max(initial=-1)) + 1, NO_REPLICA)

    def admit(
        self, sequence: int, replica: int, steps: int, *, leaving: int = 0
    ) -> Admitted | None:
        """Gives a sequence pages for its tokens and `steps` more; returns None if too few are free.

        Args:
          leaving: number of the replica's pages that must stay free.
        """
        pool = self.tables.pools[replica]
        room = self._room(sequence, steps)
        known = self.contents.known(sequence)
        if known is None:
            cached = int(self.table.length[sequence]) - 1
            pages = pool.take(num_pages_for(cached + room, pool.page_size), leaving=leaving)
            admitted = None if pages is None else Admitted(pages, 0, None)
        else:
            admitted = pool.admit(known, room, leaving=leaving)
        if admitted is not None:
            self.give(sequence, replica, admitted.pages)
            self.turn[sequence] = self._num_admitted = self._num_admitted + 1
        return admitted

    def give(self, sequence: int, replica: int, pages: np.ndarray) -> None:
        self.tables.give(sequence, replica, pages)
        self.note_prefix_replica(sequence, replica)

    def more_pages(self, sequence: int, steps: int, *, after: int) -> int:
        """Returns how many pages a sequence with room for `after` more tokens lacks for `steps`."""
        cached = int(self.table.length[sequence]) - 1
        size = self.tables.page_size
        now, then = (cached + self._room(sequence, n) for n in (after, steps))
        return num_pages_for(then, size) - num_pages_for(now, size)

    def _room(self, sequence: int, steps: int) -> int:
        return min(steps, int(self.table.end[sequence] - self.table.length[sequence]))

    def work(self, admitted: list[tuple[int, Admitted]]) -> PrefillWork:
        i = np.array([i for i, _ in admitted], np.int64)
        start = np.array([given.num_cached for _, given in admitted], np.int64)
        stop = self.table.length[i] - 1
        replica = self.tables.replica[i]
        is_new = start < stop
        spans = Spans(i[is_new], replica[is_new], start[is_new], stop[is_new])
        copies = [
            (g, *given.copy)
            for g, (_, given) in zip(replica.tolist(), admitted, strict=True)
            if given.copy is not None
        ]
        replicas, sources, targets = np.array(copies, np.int32).reshape(-1, 3).T
        return PrefillWork(spans, Copies(replicas, sources, targets))


class Filling:
    """One round of admissions. Keeps which replicas still have room, and which sequences were
    admitted."""

    def __init__(self, admissions: Admissions, most: int, steps: int, at_once: int):
        """
        Args:
          most: the most sequences that may run in one replica.
          steps, at_once: numbers of tokens, see `CacheManager.admit`.
        """
        table = admissions.table
        running = table.replica(table.running)
        self.admissions = admissions
        self.most = most
        self.steps = steps
        self.at_once = at_once
        # Per replica, pages that must stay free for its running sequences.
        self.needed = admissions.tables.lacking(steps).tolist()
        self.count = np.bincount(running, minlength=table.num_replicas).tolist()
        self.open = {g for g, count in enumerate(self.count) if count < most}
        self.admitted: list[tuple[int, Admitted]] = []

    def take(self, sequence: int, replicas: set[int]) -> bool:
        """Admits a sequence to the one of `replicas` with most free pages, if these are enough.

        Returns whether it was admitted. A replica with too few pages for it admits no other
        sequence in this round.
        """
        pools = self.admissions.tables.pools
        needed = self.needed
        later = self.admissions.more_pages(sequence, self.steps, after=self.at_once)
        for replica in sorted(replicas, key=lambda g: needed[g] - pools[g].num_free):
            leaving = needed[replica] + later
            given = self.admissions.admit(sequence, replica, self.at_once, leaving=leaving)
            if given is None:
                # Closed, so that later sequences that need fewer pages do not overtake this one.
                self.open.discard(replica)
                continue
            self.admitted.append((sequence, given))
            needed[replica] = leaving
            self.count[replica] += 1
            if self.count[replica] == self.most:
                self.open.discard(replica)
            return True
        return False
