"""The sequences of a rollout: how far each has come, which has a row, which waits for one.

All on the host, in NumPy. Decides nothing about layouts and touches no device array.
"""

from collections.abc import Sequence

import numpy as np

from pat_jax.planning.types import Load

NO_ROW = -1
NO_SEQUENCE = -1
NO_TOKEN = -1


class SequenceTable:
    """One entry for each sequence; not what it says: see `contents.py`.

    A sequence waits (it has no row), is running, or is done. All wait at first. Rows of replica g
    are g·R … (g + 1)·R - 1.
    """

    def __init__(
        self,
        prompt_length: np.ndarray,  # int[sequences], tokens
        max_new_tokens: np.ndarray,  # int[sequences]
        *,
        prompt_id: np.ndarray | None = None,  # int[sequences], where every prompt is known
        num_replicas: int,
        rows_per_replica: int,
    ):
        self.num_replicas, self.rows_per_replica = num_replicas, rows_per_replica
        self.prompt_length = np.asarray(prompt_length, np.int32)
        self.end = self.prompt_length + np.asarray(max_new_tokens, np.int32)
        self.length = self.prompt_length.copy()
        self.is_done = np.zeros(len(self.length), bool)
        self.has_prompt_ids = prompt_id is not None
        ids = np.zeros(0, np.int64) if prompt_id is None else prompt_id
        self.prompt_id, self.sibling = np.unique(ids, return_inverse=True)
        self.num_steps = 0  # decode steps so far
        # Tokens by which a sequence that is running all along has gone on, on average: with drafts
        # more than steps.
        self.progress = 0.0
        self.done_after = np.zeros(len(self.length), np.int64)  # decode steps, of those done
        self.row = np.full(len(self.length), NO_ROW, np.int64)
        # Counts what the host has changed of the rows. A copy of them that was made under another
        # version is out of date; what a burst changes its own copy knows.
        self.version = 0
        self._running: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.length)

    @property
    def running(self) -> np.ndarray:
        """Indices of the sequences in rows."""
        if self._running is None:
            self._running = np.flatnonzero(self.row != NO_ROW)
        return self._running

    @property
    def waiting(self) -> np.ndarray:
        """Indices of the sequences that are neither running nor done."""
        return np.flatnonzero((self.row == NO_ROW) & ~self.is_done)

    @property
    def row_to_sequence(self) -> np.ndarray:
        """The sequence in each row, int[replicas · rows]; NO_SEQUENCE in empty ones."""
        row_to_sequence = np.full(self.num_replicas * self.rows_per_replica, NO_SEQUENCE, np.int64)
        running = self.running
        row_to_sequence[self.row[running]] = running
        return row_to_sequence

    @property
    def has_work(self) -> bool:
        return not self.is_done.all()

    @property
    def fullest(self) -> int:
        """Running sequences of the fullest replica."""
        return int(np.bincount(self.replica(self.running), minlength=1).max())

    @property
    def max_context(self) -> int:
        """Tokens in the cache of the longest running sequence."""
        return int(self.length[self.running].max()) - 1

    def load(self) -> Load:
        running = self.running
        return Load(
            replica=self.replica(running),
            generated=self.length[running] - self.prompt_length[running],
            context=self.length[running] - 1,
            remaining_tokens=self.end[running] - self.length[running],
            prompt=self.sibling[running] if self.has_prompt_ids else None,
            waiting=len(self.waiting),
            step=self.progress,
        )

    def replica(self, sequences: np.ndarray) -> np.ndarray:
        """The replica of each of some running sequences."""
        return self.row[sequences] // self.rows_per_replica

    def add(self, sequences: np.ndarray, replica: np.ndarray) -> None:
        """Waiting sequences get the first free rows of their `replica`, int[sequences] each."""
        for number in np.unique(replica).tolist():
            members = sequences[replica == number]
            rows = number * self.rows_per_replica + np.arange(self.rows_per_replica)
            free = np.setdiff1d(rows, self.row, assume_unique=True)
            if len(free) < len(members):
                raise ValueError(
                    f"{len(members)} sequences do not fit the {len(free)} free rows of a replica."
                )
            self.row[members] = free[: len(members)]
        self._changed()

    def remove(self, sequences: np.ndarray) -> None:
        """Running sequences give up their rows and wait."""
        self.row[sequences] = NO_ROW
        self._changed()

    def advance(
        self,
        emitted: np.ndarray,
        still_running: np.ndarray,
        steps: int,
        running_steps: np.ndarray | None = None,
    ) -> None:
        """After a burst of `steps`: int[running] new tokens, bool[running]; ended ones lose rows.

        Args:
          running_steps: int[running], in which each was running; one a token where not given.
        """
        running, running_steps = self.running, emitted if running_steps is None else running_steps
        self.length[running] += emitted
        self.is_done[running] = ~still_running
        self.done_after[running] = self.num_steps + running_steps
        self.num_steps += steps
        self.progress += steps * float(emitted.sum()) / max(1, float(running_steps.sum()))
        self.row[running[~still_running]] = NO_ROW
        self._running = running[still_running]

    def end_now(self, sequences: np.ndarray) -> None:
        """Running sequences that are to generate nothing more."""
        self.is_done[sequences] = True
        self.done_after[sequences] = self.num_steps
        self.row[sequences] = NO_ROW
        self._changed()

    def compact(self, new_rows: int) -> None:
        """Moves the running sequences of each replica to its first rows, of a new row bucket."""
        running = self.running[np.argsort(self.row[self.running])]
        replica = self.row[running] // self.rows_per_replica
        index = np.arange(len(running)) - np.searchsorted(replica, replica)
        self.row[running] = replica * new_rows + index
        self.rows_per_replica = new_rows
        self._changed()

    def regroup(self, num_replicas: int, is_recomputed: np.ndarray) -> np.ndarray:
        """The replica that each running sequence gets in a switch to `num_replicas`, int[running].

        A sequence that migrates stays with devices that hold a part of it. Replicas merge with
        those congruent modulo the number of replicas afterwards, and split into those congruent
        modulo the number before. One that is recomputed, bool[running], goes wherever most room is.
        Longest first, so that those likely to run longest go to different replicas.
        """
        running, before = self.running, self.num_replicas
        old = self.replica(running)
        new, filled = np.empty(len(running), np.int64), np.zeros(num_replicas, np.int64)
        everywhere = np.arange(num_replicas)
        for i in np.lexsort((-self.length[running], is_recomputed)):
            choice = everywhere if is_recomputed[i] else everywhere[old[i] % num_replicas :: before]
            new[i] = choice[filled[choice].argmin()]
            filled[new[i]] += 1
        return new

    def assign_rows(self, replica: np.ndarray, *, num_replicas: int, rows_per_replica: int) -> None:
        """Gives every running sequence a row of its `replica`, int[running]; longest first."""
        running = self.running
        order = np.lexsort((-self.length[running], replica))
        start = np.searchsorted(replica[order], np.arange(num_replicas))
        index = np.arange(len(running)) - start[replica[order]]
        if len(running) and index.max() >= rows_per_replica:
            raise ValueError(
                f"{index.max() + 1} sequences do not fit a replica of {rows_per_replica} rows."
            )
        self.row[running[order]] = replica[order] * rows_per_replica + index
        self.num_replicas, self.rows_per_replica = num_replicas, rows_per_replica
        self._changed()

    def _changed(self) -> None:
        """The host has changed rows."""
        self._running = None
        self.version += 1

    def check_integrity(self) -> None:
        """Raises AssertionError where rows and lengths contradict each other."""
        running = np.flatnonzero(self.row != NO_ROW)
        rows = self.num_replicas * self.rows_per_replica
        assert np.array_equal(self.running, running), "the running sequences are those with a row"
        assert not self.is_done[running].any(), "a sequence that is done has no row"
        assert len(np.unique(self.row[running])) == len(running), "two sequences share a row"
        assert (self.row[running] < rows).all(), "a row is not one of a replica"
        assert (self.prompt_length <= self.length).all() and (self.length <= self.end).all()


def options(
    table: SequenceTable, pages: np.ndarray, free: np.ndarray, row_buckets: Sequence[int]
) -> list[np.ndarray]:
    """Where sequences would be, int[running]: for each smaller row bucket that could hold every
    replica, and as evenly as they can be.

    None while sequences wait: they get the rows that become free, and keep the replicas even.

    Args:
      pages: int[running], that each sequence holds.
      free: int[replicas], that each replica can still give out.
      row_buckets: rows of one replica.
    """
    if table.num_replicas == 1 or len(table.waiting) or not len(table.running):
        return []
    replica = table.replica(table.running)
    even = -(-len(replica) // table.num_replicas)
    smaller = {rows for rows in (even, *row_buckets) if even <= rows < table.fullest}
    found = (evened(replica, pages, free, rows) for rows in sorted(smaller))
    return [new for new in found if new is not None]


def evened(
    replica: np.ndarray, pages: np.ndarray, free: np.ndarray, most: int
) -> np.ndarray | None:
    """The replica of each sequence, int[running], with at most `most` each; None if pages lack.

    As few move as can, those with fewest pages, each to the emptiest replica that has as many. No
    replica both gives sequences away and gets some: pages that leave make no room for pages that
    arrive.
    """
    count, new, free = np.bincount(replica, minlength=len(free)), replica.copy(), free.copy()
    for i in np.argsort(pages, kind="stable"):
        if count[replica[i]] <= most:
            continue
        fits = np.flatnonzero((count < most) & (free >= pages[i]))
        if not len(fits):
            return None
        new[i] = target = fits[np.lexsort((-free[fits], count[fits]))[0]]
        count[replica[i]] -= 1
        count[target] += 1
        free[target] -= pages[i]
    return new
