"""The scheduler's orders, and the executor that carries them out on devices or in a replay."""

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
    """A decode burst to dispatch: its program, and when it ends."""

    shape: Shape
    max_steps: int
    threshold: int  # the burst ends when no replica has more running sequences than this
    is_ahead: bool  # dispatched behind another, whose results are not known
    accept_prob: np.ndarray | None  # probabilities that draft tokens are accepted, see Plan
    predicted: DraftPrediction | None  # what the plan predicts of the drafts
    reserved: ReservedPages  # pages that its rows may take; the burst ends if they run out


@dataclass(frozen=True)
class Relocation:
    """A move of running sequences to other replicas, of another layout or of the same one."""

    source: Split
    target: Split
    load: Load  # before the move
    replica: np.ndarray  # int[running], replica of each sequence after the move
    is_left: np.ndarray  # bool[running], sequences whose pages are left behind; others migrate
    moves: PageMoves


class Collected(NamedTuple):
    """The result of a burst."""

    steps: int  # decode steps of the burst
    tokens: int  # tokens that all rows generated
    running_steps: int  # steps in which each row was running, summed over rows
    drafted: DraftResult
    held: float  # see BurstResult
    ended: np.ndarray  # int[ended], the sequences that ended in the burst
    poisoned: Copies  # copies of the null page onto pages that may hold NaN


@dataclass(frozen=True)
class Arrival:
    """The result of a relocation on the devices."""

    # int[moves], the page in which each move arrived, NULL_PAGE if the page stayed behind; None:
    # every move arrived in the page that the cache manager assigned.
    new_page: np.ndarray | None = None
    sent: MovedBytes | None = None  # None on a simulated clock


class Executor(ABC):
    """Carries out what the scheduler decides. Bursts are collected in the order of their launch."""

    clock: Stopwatch

    @abstractmethod
    def prefill(self, work: PrefillWork) -> int:
        """Computes the KV cache of known tokens into their pages, then copies pages.

        The newest token of a sequence is left to the first decode step, so no logits are needed.

        Returns:
          The tokens that the prefill calls had room for, padding included.
        """

    @abstractmethod
    def scrub(self, poisoned: Copies) -> None:
        """Overwrites pages that may hold NaN."""

    @abstractmethod
    def launch(self, burst: Burst) -> None:
        """Dispatches a burst behind those that are running."""

    @abstractmethod
    def collect(self) -> tuple[RowsOutput, bool]:
        """Waits for the oldest running burst.

        Returns:
          Its output, and whether its duration is known: the time since the previous burst ended.
        """

    @abstractmethod
    def relocate(self, relocation: Relocation) -> Arrival:
        """Reshards the weights to the target layout, and moves pages to their new replicas."""

    def recompute(self, relocation: Relocation, work: PrefillWork, waits: np.ndarray) -> int:
        """Recomputes the pages that a relocation left behind; returns the same as `prefill`.

        Args:
          waits: bool[running], the sequences that found no pages and are recomputed later.
        """
        del relocation, waits
        return self.prefill(work)

    @abstractmethod
    def release(self) -> None:
        """Frees the rollout's memory. It is also called if the rollout is abandoned."""
