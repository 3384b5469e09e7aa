"""The runs that verification steps are parts of, as the engine counts them
(`planning/drafts.py`)."""

from typing import NamedTuple

import numpy as np

from pat_jax.engine.device.draft.ngram import CONTEXT
from pat_jax.planning.draft_counts import (
    BRANCHES,
    DRAFTS,
    KINDS,
    MATCH_BIN_EDGES,
    MAX_RUN,
    DraftResult,
)
from pat_jax.profiling.simulate.draft_counting import Steps


class InRuns(NamedTuple):
    """What the engine knows of each step (`engine/device/draft/token_batch.py`), in the order of
    rows and their steps."""

    group: np.ndarray
    step: np.ndarray  # of the lockstep
    accepted: np.ndarray
    begun: np.ndarray  # the kind of match with which its run began
    place: np.ndarray  # in the run, of the first token of its draft
    goes_on: np.ndarray  # with the run of the step before
    # Where the step before had left a run that could go on: the place of the token drawn last, else -1.
    last: np.ndarray
    beside: np.ndarray  # the kind of match of its branch
    branched: np.ndarray
    is_drafted: np.ndarray

    @classmethod
    def of(cls, steps: Steps, draft: int) -> "InRuns":
        steps = steps.of(np.lexsort((steps.step, steps.row)))
        is_next = np.diff(steps.row, prepend=-1) == 0
        full = np.minimum(steps.matched + draft + 1, CONTEXT) * (steps.matched > 0)
        needed = np.roll(np.where(steps.accepted == draft, full, 0), 1) * is_next
        goes_on = (needed > 0) & (steps.matched >= needed)
        first = np.maximum.accumulate(np.where(goes_on, 0, np.arange(len(steps))))
        begun = np.searchsorted(MATCH_BIN_EDGES, steps.matched, side="right")[first]
        place = np.minimum((np.arange(len(steps)) - first) * (draft + 1), MAX_RUN - draft)
        last = np.where(needed > 0, np.minimum(np.roll(place, 1) + draft + 1, MAX_RUN) - 1, -1)
        beside = np.searchsorted(MATCH_BIN_EDGES, steps.beside, side="right")
        branches = beside, steps.branched, steps.matched > 0
        return cls(steps.group, steps.step, steps.accepted, begun, place, goes_on, last, *branches)

    def counts(self, draft: int, part: np.ndarray, parts: int) -> tuple[np.ndarray, ...]:
        """Counts of parts of the steps: those of `DraftResult` without sources, with a first axis
        for the parts.

        Args:
          part: int[steps], from 0.
        """
        proposed, accepted = np.zeros((2, parts, 2, KINDS, MAX_RUN), np.int32)
        of_drafts, of_branches = (
            [x[:, one] for x in (proposed, accepted)] for one in (DRAFTS, BRANCHES)
        )
        (fork,) = np.nonzero(self.is_drafted & (self.beside > 0) & (self.accepted == 0))
        for turn in range(draft):
            at = part, self.begun, self.place + turn
            np.add.at(of_drafts[0], at, self.accepted >= turn)
            np.add.at(of_drafts[1], at, self.accepted > turn)
            at = part[fork], self.beside[fork], np.full_like(fork, turn)
            np.add.at(of_branches[0], at, self.branched[fork] >= turn)
            np.add.at(of_branches[1], at, self.branched[fork] > turn)
        # The token behind a draft that was right: of the run of the step before.
        (behind,) = np.nonzero(self.last >= 0)
        at = part[behind], self.begun[behind - 1], self.last[behind]
        np.add.at(of_drafts[0], at, 1)
        np.add.at(of_drafts[1], at, self.goes_on[behind])
        begun = np.zeros((parts, KINDS), np.int32)
        np.add.at(begun, (part, self.begun), ~self.goes_on)
        branch_counts = np.zeros((parts, KINDS, KINDS), np.int32)
        np.add.at(branch_counts, (part, self.begun, self.beside), self.is_drafted)
        return begun, proposed, accepted, branch_counts, draft * np.bincount(part, minlength=parts)


def counts_of(steps: Steps, draft: int) -> DraftResult:
    """Counts of all steps."""
    of_one = InRuns.of(steps, draft).counts(draft, np.zeros(len(steps), int), 1)
    return DraftResult(*(x[0] for x in of_one))
