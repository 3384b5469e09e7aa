"""What the cache manager has to know of texts: which share a prefix, and which got NaN logits.

On the host. `responses.py` knows every token; a replay knows only lengths and which prompts are
equal.
"""

from typing import Protocol

import numpy as np

from pat_jax.engine.sequences.sequence_table import SequenceTable
from pat_jax.planning.draft_counts import DraftResult


class RowsOutput(Protocol):
    """The result of a burst for each row, as host arrays."""

    @property
    def emitted(self) -> np.ndarray: ...  # int[rows], tokens generated

    @property
    def running(self) -> np.ndarray: ...  # bool[rows], rows still running

    @property
    def steps(self) -> int | np.integer: ...  # decode steps

    @property
    def pages(
        self,
    ) -> np.ndarray: ...  # int32[rows, most], pages taken; NULL_PAGE after the last

    @property
    def running_steps(self) -> np.ndarray: ...  # int[rows], steps in which each row was running

    @property
    def drafted(self) -> DraftResult: ...  # counts of each replica


class Contents:
    """The contents of sequences whose tokens are unknown, as in a simulation. Only which sequences
    share a prompt is known."""

    def __init__(self, table: SequenceTable):
        count = len(table)
        self.table = table
        # int[sequences], equal for equal prompts.
        self.prompt = table.sibling if table.has_prompt_ids else np.arange(count)

    def known(self, i: int) -> np.ndarray | None:
        """Returns a sequence's tokens, int32[length], to find shared pages; None if it shares none.

        This class makes tokens up: those of a prompt are the same in all its samples, those of a
        response belong to no other.
        """
        if not self.table.has_prompt_ids:
            return None
        tokens = np.full(self.table.length[i], -1 - i, np.int32)
        tokens[: self.table.prompt_length[i]] = self.prompt[i]
        return tokens

    def has_failed(self, i: int) -> bool:
        """Returns whether the newest token of sequence i was sampled from NaN logits."""
        del i
        return False

    def poisoned_replicas(self, output: RowsOutput) -> list[int]:
        """Returns replicas where a row sampled from NaN logits after its sequence was ended."""
        del output
        return []

    def take(self, output: RowsOutput) -> None:
        """Stores what a burst generated for the running sequences; call it before `advance`."""
        del output
