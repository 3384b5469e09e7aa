"""A move between groups in two stages: pages are sent while all decode on, then their sequences follow.

Knows what is between the stages. Whether a move has two says the planner, what follows the scheduler.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from pat_jax.engine.layout.buckets import Buckets
from pat_jax.engine.relocation.rounds import Shift
from pat_jax.engine.relocation.sent_pages import SentPages
from pat_jax.engine.sequences.block_tables import BlockTables
from pat_jax.planning.types import Balance, Split


@dataclass(frozen=True)
class FirstStage:
    """As it was planned and as it went."""

    balance: Balance
    step: int  # decode steps of the rollout before
    fullest: int  # live sequences of the fullest group then
    sequences: int  # that are to go
    seconds: float = 0.0  # that sending their pages has taken


class TwoStages:
    """Of the moves of one rollout; at most one is between its stages."""

    def __init__(self, tables: BlockTables, buckets: Buckets):
        self.tables, self.table, self.buckets = tables, tables.table, buckets
        self._begun: tuple[FirstStage, SentPages] | None = None
        self._dropped: FirstStage | None = None

    @property
    def is_between(self) -> bool:
        return self._begun is not None

    def send(self, balance: Balance) -> tuple[Shift, ...]:
        """The first: pages to be sent while a burst runs, behind which none is dispatched."""
        assert balance.sending is not None
        table, pages = self.table, SentPages(self.tables, balance.group, balance.sending.rounds)
        sequences = int((balance.group != table.group(table.live)).sum())
        self._begun = FirstStage(balance, table.num_steps, table.fullest, sequences), pages
        return pages.shifts

    def note_sent(self, seconds: float) -> None:
        """What that has taken."""
        assert self._begun is not None
        first, pages = self._begun
        self._begun = replace(first, seconds=seconds), pages

    def most_steps(self, every: int) -> float:
        """Of the next burst: as long as pages are on their way, in multiples of `every`."""
        if self._begun is None:
            return math.inf
        sending = self._begun[0].balance.sending
        assert sending is not None
        return -(-sending.steps // every) * every

    def second(self, split: Split) -> Balance | None:
        """The second, where it still empties a row bucket and finds pages; None: a move that has begun is dropped.

        Args:
          split: the layout of the next burst; in another one there is nothing to follow.
        """
        if self._begun is None:
            return None
        first, pages = self._begun
        if split.dp == self.table.num_groups and self._pays(split, group := pages.groups()):
            return replace(first.balance, group=group, sending=None)
        self._begun, self._dropped = None, first
        return None

    def _pays(self, split: Split, group: np.ndarray) -> bool:
        """Whether a row bucket is emptied, and there are pages for all that sequences have by now."""
        table, tables = self.table, self.tables
        if len(table.waiting):  # they get the rows that become free
            return False
        rows = self.buckets.rows_for(split, table.fullest)
        if np.bincount(group).max() > self.buckets.rows_below(split, rows):
            return False
        moved = group != table.group(table.live)
        arriving = np.bincount(group[moved], tables.count[table.live[moved]], minlength=split.dp)
        return bool((arriving <= tables.free).all())

    def dropped(self) -> FirstStage | None:
        """A move that has no second stage; told once."""
        dropped, self._dropped = self._dropped, None
        return dropped

    def end(self) -> tuple[FirstStage, np.ndarray] | None:
        """Before the sequences follow: the first stage, and of which pages copies have been sent, as
        `SentPages.is_kept` has it; None where there was no such stage."""
        if self._begun is None:
            return None
        (first, pages), self._begun = self._begun, None
        return first, pages.is_kept()
