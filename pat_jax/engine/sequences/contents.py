"""What the cache manager asks of generated texts: which begin alike, and which have failed.

On the host. `responses.py` knows every token; a replay knows lengths alone, and which prompts are
alike.
"""

from typing import Protocol

import numpy as np

from pat_jax.engine.sequences.sequence_table import SequenceTable
from pat_jax.planning.draft_counts import DraftResult


class RowsOutput(Protocol):
    """What a burst did to the rows; arrays of the host."""

    @property
    def emitted(self) -> np.ndarray: ...  # int[rows], tokens sampled

    @property
    def running(self) -> np.ndarray: ...  # bool[rows], that go on

    @property
    def steps(self) -> int | np.integer: ...  # decode steps

    @property
    def pages(
        self,
    ) -> np.ndarray: ...  # int32[rows, most], that each drew; NULL_PAGE after the last

    @property
    def running_steps(self) -> np.ndarray: ...  # int[rows], in which each was running

    @property
    def drafted(self) -> DraftResult: ...  # of drafts, of each replica


class Contents:
    """What is known of sequences whose tokens are not: which of them share a prompt."""

    def __init__(self, table: SequenceTable):
        count = len(table)
        self.table = table
        # int[sequences], equal where prompts are.
        self.prompt = table.sibling if table.has_prompt_ids else np.arange(count)

    def known(self, i: int) -> np.ndarray | None:
        """Tokens so far, int32[length], by which pages are found again; None: no others are alike.

        Here made up: the prompt's are the same in all its samples, the response's are nobody
        else's.
        """
        if not self.table.has_prompt_ids:
            return None
        tokens = np.full(self.table.length[i], -1 - i, np.int32)
        tokens[: self.table.prompt_length[i]] = self.prompt[i]
        return tokens

    def has_failed(self, i: int) -> bool:
        """The newest token of sequence i was drawn from logits that are no numbers."""
        del i
        return False

    def poisoned_replicas(self, output: RowsOutput) -> list[int]:
        """Replicas with a row that drew from NaN logits after it had been given up."""
        del output
        return []

    def take(self, output: RowsOutput) -> None:
        """Notes what a burst generated for the running sequences, before the table is told."""
        del output
