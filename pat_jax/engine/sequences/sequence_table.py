"""The sequences of a rollout: their lengths, which have a row, and which wait for one.

All on the host, in NumPy. Decides nothing about layouts and touches no device array.
"""

from collections.abc import Sequence

import numpy as np

from pat_jax.planning.types import Load

NO_ROW = -1
NO_SEQUENCE = -1
NO_TOKEN = -1


class SequenceTable:
    """The state of each sequence, without its tokens (see `contents.py`).

    A sequence waits (it has no row), is running, or is done. All wait at first. With R rows per
    replica, the rows of replica g are g·R … (g + 1)·R - 1.
    """

    def __init__(
        self,
        prompt_length: np.ndarray,  # int[sequences], tokens
        max_new_tokens: np.ndarray,  # int[sequences]
        *,
        prompt_id: np.ndarray | None = None,  # int[sequences], if every prompt has an id
        num_replicas: int,
        rows_per_replica: int,
    ):
        self.num_replicas = num_replicas
        self.rows_per_replica = rows_per_replica
        self.prompt_length = np.asarray(prompt_length, np.int32)
        self.end = self.prompt_length + np.asarray(max_new_tokens, np.int32)
        self.length = self.prompt_length.copy()
        self.is_done = np.zeros(len(self.length), bool)
        self.has_prompt_ids = prompt_id is not None
        ids = np.zeros(0, np.int64) if prompt_id is None else prompt_id
        self.prompt_id, self.sibling = np.unique(ids, return_inverse=True)
        self.num_steps = 0  # decode steps so far
        # Tokens that an average sequence would have generated if it had run in all steps: with
        # drafts more than `num_steps`.
        self.progress = 0.0
        self.done_after = np.zeros(len(self.length), np.int64)  # decode steps until each was done
        self.row = np.full(len(self.length), NO_ROW, np.int64)
        # Counts the changes of rows by the host. After one, the rows on the devices are out of
        # date; a burst changes the rows on the devices itself.
        self.version = 0
        self._running: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.length)

    @property
    def running(self) -> np.ndarray:
        """Indices of the sequences with a row, int[running]."""
        if self._running is None:
            self._running = np.flatnonzero(self.row != NO_ROW)
        return self._running

    @property
    def waiting(self) -> np.ndarray:
        """Indices of the sequences that are neither running nor done, int[waiting]."""
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
        """The number of running sequences in the replica that has most."""
        return int(np.bincount(self.replica(self.running), minlength=1).max())

    @property
    def max_context(self) -> int:
        """The number of tokens that the longest running sequence has in the cache."""
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
        """Returns the replica of some running sequences, int[sequences]."""
        return self.row[sequences] // self.rows_per_replica

    def add(self, sequences: np.ndarray, replica: np.ndarray) -> None:
        """Gives waiting sequences the first free rows of their `replica`, int[sequences] each."""
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
        """Takes the rows of some running sequences away; these sequences then wait."""
        self.row[sequences] = NO_ROW
        self._changed()

    def advance(
        self,
        emitted: np.ndarray,
        still_running: np.ndarray,
        steps: int,
        running_steps: np.ndarray | None = None,
    ) -> None:
        """Updates the table after a burst of `steps` decode steps; ended sequences lose their rows.

        Args:
          emitted: int[running], new tokens of each sequence.
          still_running: bool[running], False for sequences that have ended.
          running_steps: int[running], steps in which each was running; None: as many as new tokens.
        """
        running = self.running
        running_steps = emitted if running_steps is None else running_steps
        self.length[running] += emitted
        self.is_done[running] = ~still_running
        self.done_after[running] = self.num_steps + running_steps
        self.num_steps += steps
        self.progress += steps * float(emitted.sum()) / max(1, float(running_steps.sum()))
        self.row[running[~still_running]] = NO_ROW
        self._running = running[still_running]

    def end_now(self, sequences: np.ndarray) -> None:
        """Ends running sequences at once."""
        self.is_done[sequences] = True
        self.done_after[sequences] = self.num_steps
        self.row[sequences] = NO_ROW
        self._changed()

    def compact(self, new_rows: int) -> None:
        """Changes the rows per replica to `new_rows`; running sequences move to the first rows."""
        running = self.running[np.argsort(self.row[self.running])]
        replica = self.row[running] // self.rows_per_replica
        index = np.arange(len(running)) - np.searchsorted(replica, replica)
        self.row[running] = replica * new_rows + index
        self.rows_per_replica = new_rows
        self._changed()

    def regroup(self, num_replicas: int, is_recomputed: np.ndarray) -> np.ndarray:
        """Returns each running sequence's replica in a switch to `num_replicas`, int[running].

        A sequence that migrates stays on devices that hold a part of its pages. Old and new
        replicas share devices if their numbers are congruent modulo the smaller number of replicas.
        A sequence that is recomputed (`is_recomputed`, bool[running]) goes to the replica with
        fewest sequences. The longest are assigned first, so that they go to different replicas.
        """
        running = self.running
        before = self.num_replicas
        old = self.replica(running)
        new = np.empty(len(running), np.int64)
        filled = np.zeros(num_replicas, np.int64)
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
        self.num_replicas = num_replicas
        self.rows_per_replica = rows_per_replica
        self._changed()

    def _changed(self) -> None:
        """Notes that the host has changed rows."""
        self._running = None
        self.version += 1

    def check_integrity(self) -> None:
        """Raises AssertionError if rows and lengths contradict each other."""
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
    """Returns possible assignments of running sequences to replicas, int[running] each.

    One makes the replicas as even as possible. Others let all replicas use a smaller row bucket,
    one for each such bucket. There are none while sequences wait, because waiting sequences fill
    free rows and keep the replicas even.

    Args:
      pages: int[running], number of pages that each sequence holds.
      free: int[replicas], number of free pages of each replica.
      row_buckets: the buckets of the layout, in rows per replica.
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
    """Returns a new replica for each sequence, int[running], such that no replica has more than
    `most` sequences.

    Returns None if too few pages are free. As few sequences move as possible, those with fewest
    pages first, each to the emptiest replica with enough free pages. No replica both gives and
    receives sequences: pages that leave make no room for pages that arrive.
    """
    count = np.bincount(replica, minlength=len(free))
    new = replica.copy()
    free = free.copy()
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
