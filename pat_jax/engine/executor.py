"""The executor: it does what the scheduler decides, on devices or on a simulated clock."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from pat_jax.common.stopwatch import Stopwatch
from pat_jax.engine.orders import Burst, Relocation
from pat_jax.engine.sequences.contents import RowsOutput
from pat_jax.engine.sequences.prefill_calls import Copies, MovedBytes, PrefillWork


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
        """Computes pages of known tokens, then copies pages; returns tokens that its calls had room
        for.

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
        """Recomputes what a relocation left behind, except for sequences that wait,
        bool[running]."""
        del relocation, waits
        return self.prefill(work)

    @abstractmethod
    def release(self) -> None:
        """Frees what the rollout has held; also where it is given up in the middle."""
