"""The order in which the rows of a set are drawn, epoch after epoch, in batches of any size.

Knows row numbers and which rows are equal. Does not know the rows' contents.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int


class Cursor(NamedTuple):
    """The position in the data at which a batch begins."""

    epoch: int = 0
    offset: int = 0  # number of rows of the epoch that have been drawn or skipped


START = Cursor()


class Epochs:
    """A new random order every epoch, in which equal rows are as far apart as possible.

    A batch holds no two equal rows, unless it is larger than the number of different rows. Rows
    that a batch skips are left out in this epoch, and so are the last rows if they fill no batch.
    Each epoch leaves out other rows.
    """

    def __init__(self, keys: Sequence[Hashable], *, seed: int):
        """
        Args:
          keys: key of each row; equal rows have equal keys.
        """
        numbers: dict[Hashable, int] = {}
        self._alike = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
        self.num_different = len(numbers)
        self._seed = seed
        self._newest = (-1, np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self._alike)

    def draw(self, at: Cursor, size: int) -> tuple[list[int], Cursor]:
        """Returns the rows of the batch that begins at `at`, and where the next batch begins.

        This is a pure function.

        Args:
          size: number of rows of the batch, from 1 to `len(self)`; it may change between batches.
        """
        chosen = list[int]()
        seen = set[int]()
        may_repeat = size > self.num_different
        order = self.order(at.epoch)
        for offset in range(at.offset, len(self)):
            row = int(order[offset])
            if may_repeat or self._alike[row] not in seen:
                chosen.append(row)
                seen.add(int(self._alike[row]))
            if len(chosen) == size:
                return chosen, Cursor(at.epoch, offset + 1)
        return self.draw(Cursor(at.epoch + 1), size)

    def order(self, epoch: int) -> Int[np.ndarray, " rows"]:
        known, order = self._newest
        if known != epoch:
            order = np.random.default_rng((self._seed, epoch)).permutation(len(self))
            if self.num_different < len(self):
                order = self._spread(order)
            self._newest = epoch, order
        return order

    def _spread(self, order: Int[np.ndarray, " rows"]) -> Int[np.ndarray, " rows"]:
        """Returns the order with the k-th of n equal rows moved to (u + k) / n of the epoch. One of
        them was at u, from 0 to 1; so a row without equals stays where it is."""
        _, first, counts = np.unique(self._alike, return_index=True, return_counts=True)
        place = np.empty(len(order))
        place[order] = np.arange(len(order)) / len(order)
        alike = self._alike[order]
        grouped = np.argsort(alike, kind="stable")
        nth = np.empty(len(order))
        nth[grouped] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        return order[np.argsort((place[first[alike]] + nth) / counts[alike], kind="stable")]
