"""How many pages of the KV cache each sequence holds on a simulated clock, who waits, who gives way.

The rules of `engine/scheduler.py`, in counts alone: which page it is matters to no clock. Prompts
that several samples share are counted for each of them, though the engine keeps them once.
"""

from collections import deque

import numpy as np

from pat_jax.engine.sequences.accounts import Accounts
from pat_jax.engine.sequences.block_tables import NO_GROUP
from pat_jax.engine.sequences.page_allocator import num_pages_for
from pat_jax.planning.memory import MemoryModel
from pat_jax.planning.types import Split


class PageCounts:
    """The pools of a layout's groups, and what each sequence has of them."""

    def __init__(self, accounts: Accounts, memory: MemoryModel, split: Split):
        """
        Raises:
          ValueError: a pool is too small for the longest sequence alone.
        """
        self.accounts, self.memory, self.page_size = accounts, memory, memory.page_size
        count = len(accounts.length)
        self.held = np.zeros(count, np.int64)  # pages
        self.free = self._empty(split)  # of each group
        self._group = np.full(count, NO_GROUP, np.int64)  # where each has or had its pages
        self._prompt = accounts.sibling if accounts.has_prompt_ids else np.arange(count)
        self._home = np.full(int(self._prompt.max(initial=-1)) + 1, NO_GROUP, np.int64)
        self._queue = deque(range(count))
        self._turn = np.zeros(count, np.int64)  # largest for who was admitted last
        self._num_admitted = 0

    def _empty(self, split: Split) -> np.ndarray:
        capacity, longest = self.memory.pages[split] - 1, int(self.accounts.end.max(initial=1)) - 1
        if num_pages_for(longest, self.page_size) > capacity:
            raise ValueError(
                f"the pool of {split}, {capacity} pages of {self.page_size} tokens, does not hold a "
                f"sequence of {longest} tokens."
            )
        return np.full(split.dp, capacity, np.int64)

    def grow(self, steps: int, *, at_once: int) -> int:
        """Room for the next `steps` tokens of every live sequence, and pages for those `at_once`.

        Returns how many gave way.
        """
        num_preempted, lacking = 0, self._lacking(steps)
        for group in range(len(self.free)):
            while lacking[group] > self.free[group]:
                self._preempt(self._youngest(group))
                num_preempted, lacking = num_preempted + 1, self._lacking(steps)
        live, wanted = self._wanted(at_once)
        self._add(live, np.maximum(wanted - self.held[live], 0))
        return num_preempted

    def _lacking(self, steps: int) -> np.ndarray:
        """Pages that the live sequences of each group need besides their own for `steps` tokens."""
        live, wanted = self._wanted(steps)
        return self._group_sums(live, np.maximum(wanted - self.held[live], 0))

    def suffice(self, steps: int) -> bool:
        """Whether there are pages for the next `steps` tokens of every live sequence."""
        return bool((self._lacking(steps) <= self.free).all())

    def draw(self, left: np.ndarray, steps: int, check_every: int) -> int:
        """Pages that rows take during a burst, as they grow; it ends where a group has too few.

        Args:
          left: int[live], tokens that each sequence will still say.
          steps: most decode steps; a multiple of `check_every`.

        Returns:
          The decode steps until then.
        """
        accounts = self.accounts
        live = accounts.live

        def more(steps: int) -> np.ndarray:
            """Pages of each; who ends has drawn them up to the next test."""
            run = np.minimum(steps, -(-left // check_every) * check_every)
            tokens = np.minimum(accounts.length[live] - 1 + run, accounts.end[live] - 1)
            return np.maximum(-(-tokens // self.page_size) - self.held[live], 0)

        while steps and (self._group_sums(live, more(steps)) > self.free).any():
            steps -= check_every
        self._add(live, more(steps))
        return steps

    def _wanted(self, steps: int) -> tuple[np.ndarray, np.ndarray]:
        accounts = self.accounts
        live = accounts.live
        tokens = np.minimum(accounts.length[live] - 1 + steps, accounts.end[live] - 1)
        return live, -(-tokens // self.page_size)

    def _group_sums(self, sequences: np.ndarray, pages: np.ndarray) -> np.ndarray:
        sums = np.bincount(self._group[sequences], pages, minlength=len(self.free))
        return sums.astype(np.int64)

    def _add(self, sequences: np.ndarray, pages: np.ndarray) -> None:
        self.held[sequences] += pages
        self.free -= self._group_sums(sequences, pages)

    def _drop(self, sequences: np.ndarray) -> None:
        self._add(sequences, -self.held[sequences])

    def _youngest(self, group: int) -> int:
        live = self.accounts.live
        members = live[self._group[live] == group]
        return int(members[self._turn[members].argmax()])

    def _preempt(self, sequence: int) -> None:
        alone = np.array([sequence])
        self._drop(alone)
        self.accounts.leave(alone)
        self._queue.appendleft(sequence)

    def release_ended(self) -> None:
        self._drop(np.flatnonzero(self.accounts.is_done & (self.held > 0)))

    def admit(self, rows_per_group: int, steps: int, *, at_once: int) -> np.ndarray:
        """Free rows to those that wait, as long as all that are live then have pages for `steps`.

        Given are those for the next tokens, `at_once`. Groups are kept even, samples of a prompt
        together as far as that allows. Returns who got a row.
        """
        accounts = self.accounts
        even = -(-int((~accounts.is_done).sum()) // accounts.num_groups)
        most = min(rows_per_group, even)
        count = np.bincount(accounts.group(accounts.live), minlength=accounts.num_groups)
        is_open, admitted, late = count < most, [], []
        needed = self._lacking(steps)  # of each group, pages that are to be free

        def take(sequence: int, groups: np.ndarray) -> bool:
            """In the group with most pages left; nobody overtakes who needs more."""
            later = self._pages(sequence, steps) - self._pages(sequence, at_once)
            left = self.free - needed
            for group in groups[np.argsort(-left[groups], kind="stable")].tolist():
                leaving = int(needed[group]) + later
                if not self._admit_one(sequence, group, at_once, leaving=leaving):
                    is_open[group] = False
                    continue
                needed[group] += later
                admitted.append(sequence)
                count[group] += 1
                is_open[group] = count[group] < most
                return True
            return False

        while self._queue and is_open.any():
            sequence = self._queue.popleft()
            home, groups = self._home[self._prompt[sequence]], np.flatnonzero(is_open)
            if not take(sequence, groups if home == NO_GROUP else groups[groups == home]):
                late.append(sequence)
        late = [sequence for sequence in late if not take(sequence, np.flatnonzero(is_open))]
        self._queue.extendleft(reversed(late))
        seated = np.array(admitted, np.int64)
        accounts.enter(seated, self._group[seated])
        return seated

    def _pages(self, sequence: int, steps: int) -> int:
        """Of what a sequence has said and `steps` more."""
        accounts = self.accounts
        room = min(steps, int(accounts.end[sequence] - accounts.length[sequence]))
        return num_pages_for(int(accounts.length[sequence]) - 1 + room, self.page_size)

    def _admit_one(self, sequence: int, group: int, steps: int, leaving: int = 0) -> bool:
        pages = self._pages(sequence, steps)
        if pages + leaving > self.free[group]:
            return False
        self._take(sequence, group, pages)
        self._turn[sequence] = self._num_admitted = self._num_admitted + 1
        return True

    def _take(self, sequence: int, group: int, pages: int) -> None:
        self.held[sequence], self._group[sequence] = pages, group
        self._home[self._prompt[sequence]] = group
        self.free[group] -= pages

    def carry(
        self, target: Split, group: np.ndarray, is_recomputed: np.ndarray, steps: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Pages in the pools of another layout; all that they hold can migrate (`engine/relocation/order.py`).

        Args:
          group: int[live], of each sequence there.
          is_recomputed: bool[live], whose pages are left behind.

        Returns:
          bool[live] each: who is computed again there, and who finds no pages and has to wait.
        """
        accounts = self.accounts
        live = accounts.live
        self._drop(live[is_recomputed])
        filled = -(-(accounts.length[live] - 1) // self.page_size)
        self.free, self._home[:] = self._empty(target), NO_GROUP
        is_left = is_recomputed.copy()
        by_age = np.argsort(self._turn[live])
        for k in by_age[~is_recomputed[by_age]].tolist():
            new, pages = int(group[k]), int(filled[k])
            is_left[k] = pages > self.free[new]
            if not is_left[k]:
                self._take(int(live[k]), new, pages)
        self.held[live[is_left]] = 0
        anew = np.zeros(len(live), bool)
        for k in by_age[is_left[by_age]].tolist():
            anew[k] = self._admit_one(int(live[k]), int(group[k]), steps)
        waits = is_left & ~anew
        left = live[waits]
        for sequence in left[np.argsort(-self._turn[left])].tolist():
            self._queue.appendleft(sequence)
        return anew, waits

    def balance(self, group: np.ndarray) -> np.ndarray:
        """Live sequences to their `group` of the same layout; returns where each is then.

        A sequence that finds too few pages there for all that it has stays.
        """
        live, group = self.accounts.live, group.copy()
        old = self._group[live]
        for k in np.flatnonzero(old != group).tolist():
            sequence, pages = int(live[k]), int(self.held[live[k]])
            if self.free[group[k]] < pages:
                group[k] = old[k]
                continue
            self.free[old[k]] += pages
            self._take(sequence, int(group[k]), pages)
        return group
