"""The sequences of a rollout: how far each has come, which has a row, which waits for one.

All on the host, in NumPy. Decides nothing about layouts and touches no device array.
"""

import numpy as np

from pat_jax.planning.types import Load

NO_ROW = -1
NO_SEQUENCE = -1


class SequenceTable:
    """One entry for each sequence; not what it says: see `contents.py`.

    A sequence waits (it has no row), is live, or is done. All wait at first. Rows of group g are
    g·R … (g + 1)·R - 1.
    """

    def __init__(
        self,
        prompt_length: np.ndarray,  # int[sequences], tokens
        max_new_tokens: np.ndarray,  # int[sequences]
        *,
        prompt_id: np.ndarray | None = None,  # int[sequences], where every prompt is known
        num_groups: int,
        rows_per_group: int,
    ):
        self.num_groups, self.rows_per_group = num_groups, rows_per_group
        self.prompt_length = np.asarray(prompt_length, np.int32)
        self.end = self.prompt_length + np.asarray(max_new_tokens, np.int32)
        self.length = self.prompt_length.copy()
        self.is_done = np.zeros(len(self.length), bool)
        self.has_prompt_ids = prompt_id is not None
        ids = np.zeros(0, np.int64) if prompt_id is None else prompt_id
        self.prompt_id, self.sibling = np.unique(ids, return_inverse=True)
        self.num_steps = 0  # decode steps so far
        # Tokens by which a sequence that is live all along has gone on, on average: with drafts more
        # than steps.
        self.progress = 0.0
        self.done_after = np.zeros(len(self.length), np.int64)  # decode steps, of those done
        self.row = np.full(len(self.length), NO_ROW, np.int64)
        # Counts what the host has changed of the rows. A copy of them that was made under another
        # version is out of date; what a burst changes its own copy knows.
        self.version = 0
        self._live: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.length)

    @property
    def live(self) -> np.ndarray:
        """Indices of the sequences in rows."""
        if self._live is None:
            self._live = np.flatnonzero(self.row != NO_ROW)
        return self._live

    @property
    def waiting(self) -> np.ndarray:
        """Indices of the sequences that are neither live nor done."""
        return np.flatnonzero((self.row == NO_ROW) & ~self.is_done)

    @property
    def occupants(self) -> np.ndarray:
        """The sequence in each row, int[groups · rows]; NO_SEQUENCE in empty ones."""
        occupants = np.full(self.num_groups * self.rows_per_group, NO_SEQUENCE, np.int64)
        live = self.live
        occupants[self.row[live]] = live
        return occupants

    @property
    def has_work(self) -> bool:
        return not self.is_done.all()

    @property
    def fullest(self) -> int:
        """Live sequences of the fullest group."""
        return int(np.bincount(self.group(self.live), minlength=1).max())

    @property
    def max_context(self) -> int:
        """Tokens in the cache of the longest live sequence."""
        return int(self.length[self.live].max()) - 1

    def load(self) -> Load:
        live = self.live
        return Load(
            group=self.group(live),
            generated=self.length[live] - self.prompt_length[live],
            context=self.length[live] - 1,
            budget=self.end[live] - self.length[live],
            prompt=self.sibling[live] if self.has_prompt_ids else None,
            waiting=len(self.waiting),
            step=self.progress,
        )

    def group(self, sequences: np.ndarray) -> np.ndarray:
        """The replica of each of some live sequences."""
        return self.row[sequences] // self.rows_per_group

    def enter(self, sequences: np.ndarray, group: np.ndarray) -> None:
        """Waiting sequences get the first free rows of their `group`, int[sequences] each."""
        for number in np.unique(group).tolist():
            members = sequences[group == number]
            rows = number * self.rows_per_group + np.arange(self.rows_per_group)
            free = np.setdiff1d(rows, self.row, assume_unique=True)
            if len(free) < len(members):
                raise ValueError(
                    f"{len(members)} sequences do not fit the {len(free)} free rows of a group."
                )
            self.row[members] = free[: len(members)]
        self._changed()

    def leave(self, sequences: np.ndarray) -> None:
        """Live sequences give up their rows and wait."""
        self.row[sequences] = NO_ROW
        self._changed()

    def advance(
        self,
        emitted: np.ndarray,
        still_live: np.ndarray,
        steps: int,
        live_steps: np.ndarray | None = None,
    ) -> None:
        """After a burst of `steps`: int[live] new tokens, bool[live]; the ended give up their rows.

        Args:
          live_steps: int[live], in which each was live; one a token where not given.
        """
        live, live_steps = self.live, emitted if live_steps is None else live_steps
        self.length[live] += emitted
        self.is_done[live] = ~still_live
        self.done_after[live] = self.num_steps + live_steps
        self.num_steps += steps
        self.progress += steps * float(emitted.sum()) / max(1, float(live_steps.sum()))
        self.row[live[~still_live]] = NO_ROW
        self._live = live[still_live]

    def end_now(self, sequences: np.ndarray) -> None:
        """Live sequences that are to say nothing more."""
        self.is_done[sequences] = True
        self.done_after[sequences] = self.num_steps
        self.row[sequences] = NO_ROW
        self._changed()

    def compact(self, new_rows: int) -> None:
        """Moves the live sequences of each group to its first rows, of a new row bucket."""
        live = self.live[np.argsort(self.row[self.live])]
        group = self.row[live] // self.rows_per_group
        turn = np.arange(len(live)) - np.searchsorted(group, group)
        self.row[live] = group * new_rows + turn
        self.rows_per_group = new_rows
        self._changed()

    def regroup(self, num_groups: int, is_recomputed: np.ndarray) -> np.ndarray:
        """The group that each live sequence gets in a switch to `num_groups`, int[live].

        A sequence that migrates stays with devices that hold a part of it. Groups merge with those
        congruent modulo the number of groups afterwards, and split into those congruent modulo the
        number before. One that is recomputed, bool[live], goes wherever most room is. Longest first,
        so that those likely to run longest go to different groups.
        """
        live, before = self.live, self.num_groups
        old = self.group(live)
        new, filled = np.empty(len(live), np.int64), np.zeros(num_groups, np.int64)
        everywhere = np.arange(num_groups)
        for i in np.lexsort((-self.length[live], is_recomputed)):
            choice = everywhere if is_recomputed[i] else everywhere[old[i] % num_groups :: before]
            new[i] = choice[filled[choice].argmin()]
            filled[new[i]] += 1
        return new

    def seat(self, group: np.ndarray, *, num_groups: int, rows_per_group: int) -> None:
        """Gives every live sequence a row of its `group`, int[live]; longest first."""
        live = self.live
        order = np.lexsort((-self.length[live], group))
        start = np.searchsorted(group[order], np.arange(num_groups))
        turn = np.arange(len(live)) - start[group[order]]
        if len(live) and turn.max() >= rows_per_group:
            raise ValueError(
                f"{turn.max() + 1} sequences do not fit a group of {rows_per_group} rows."
            )
        self.row[live[order]] = group[order] * rows_per_group + turn
        self.num_groups, self.rows_per_group = num_groups, rows_per_group
        self._changed()

    def _changed(self) -> None:
        """The host has changed rows."""
        self._live = None
        self.version += 1

    def check_integrity(self) -> None:
        """
        Raises:
          AssertionError: rows and lengths contradict each other.
        """
        live, rows = np.flatnonzero(self.row != NO_ROW), self.num_groups * self.rows_per_group
        assert np.array_equal(self.live, live), "the live sequences are those with a row"
        assert not self.is_done[live].any(), "a sequence that is done has no row"
        assert len(np.unique(self.row[live])) == len(live), "two sequences share a row"
        assert (self.row[live] < rows).all(), "a row is not one of a group"
        assert (self.prompt_length <= self.length).all() and (self.length <= self.end).all()
