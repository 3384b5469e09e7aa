"""What the scheduler orders, and the executor that does it, on devices or on a simulated clock."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pat_jax.common.stopwatch import Stopwatch
from pat_jax.engine.sequences.contents import RowsOutput
from pat_jax.engine.sequences.prefill_calls import Copies, MovedBytes, PageMoves, PrefillWork
from pat_jax.engine.sequences.state import ReservedPages
from pat_jax.layout.buckets import Shape
from pat_jax.planning.draft_counts import DraftResult
from pat_jax.planning.types import DraftPrediction, Load, Split


@dataclass(frozen=True)
class Burst:
    """A decode burst to be dispatched: its program, and what ends it."""

    shape: Shape
    max_steps: int
    threshold: int  # it ends when no replica has more running sequences
    is_ahead: bool  # dispatched behind another
    accept_prob: np.ndarray | None  # of drafts, see Plan
    predicted: DraftPrediction | None  # of them
    reserved: ReservedPages  # pages for its rows to draw; where they are too few, it ends


@dataclass(frozen=True)
class Relocation:
    """Running sequences to other replicas, of another layout or of the one they are in."""

    source: Split
    target: Split
    load: Load  # as they were before
    replica: np.ndarray  # int[running], of each afterwards
    is_left: np.ndarray  # bool[running], whose pages are left behind; the others migrate
    moves: PageMoves


class Collected(NamedTuple):
    """What came of a burst."""

    steps: int
    tokens: int
    running_steps: int  # of single rows
    drafted: DraftResult
    held: float  # see BurstResult
    ended: np.ndarray  # int[ended], the sequences that it ended
    poisoned: Copies  # pages to be written over


@dataclass(frozen=True)
class Arrival:
    """How sequences and weights came to where they were to go."""

    # int[moves], NULL_PAGE: it stayed behind; None: where the cache manager put them.
    new_page: np.ndarray | None = None
    sent: MovedBytes | None = None  # None where nothing really moved


class Executor(ABC):
    """Bursts are collected in the order in which they were launched."""

    clock: Stopwatch

    @abstractmethod
    def prefill(self, work: PrefillWork) -> int:
        """Computes pages of known tokens, then copies pages; returns tokens its calls had room for.

        The newest token of a sequence is left to the first decode step, so no logits are needed.
        """

    @abstractmethod
    def scrub(self, poisoned: Copies) -> None:
        """Writes pages over that have a NaN in them."""

    @abstractmethod
    def launch(self, burst: Burst) -> None:
        """Dispatches a burst, behind those on their way."""

    @abstractmethod
    def collect(self) -> tuple[RowsOutput, bool]:
        """Waits for the oldest burst on its way.

        Returns:
          What it did, and whether the time since its predecessor says what it took.
        """

    @abstractmethod
    def relocate(self, relocation: Relocation) -> Arrival:
        """Weights to the layout, and the pages that migrate or go to other replicas."""

    def recompute(self, relocation: Relocation, work: PrefillWork, waits: np.ndarray) -> int:
        """Recomputes what a relocation left, except for sequences that wait, bool[running]."""
        del relocation, waits
        return self.prefill(work)

    @abstractmethod
    def release(self) -> None:
        """Frees what the rollout has held; also where it is given up in the middle."""
