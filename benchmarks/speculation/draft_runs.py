"""Counts runs over verification steps, as the engine counts them (`planning/drafts.py`)."""

from typing import NamedTuple

import numpy as np

from benchmarks.speculation.draft_counting import Steps
from pat_jax.engine.device.ngram import CONTEXT
from pat_jax.planning.draft_counts import (
    BRANCHES,
    DRAFTS,
    KINDS,
    MATCH_BIN_EDGES,
    MAX_RUN,
    DraftResult,
)
from pat_jax.planning.drafts import PRIOR_BRANCH_COUNTS, Acceptance
from pat_jax.profiling.simulate.draft_sources import SURE


class _Runs(NamedTuple):
    """What the engine knows about each step (`engine/device/token_batch.py`), in the order of
    rows and their steps."""

    accepted: np.ndarray
    begun: np.ndarray  # the kind of match with which its run began
    place: np.ndarray  # in the run, of the first token of its draft
    goes_on: np.ndarray  # whether it continues the run of the step before
    # If the run of the step before could go on: the place of its last drawn token; else -1.
    last: np.ndarray
    beside: np.ndarray  # the kind of match of its branch
    branched: np.ndarray
    is_drafted: np.ndarray


def _runs(steps: Steps, draft: int) -> _Runs:
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
    return _Runs(steps.accepted, begun, place, goes_on, last, *branches)


def counts_of(steps: Steps, draft: int) -> DraftResult:
    """Returns the counts of all steps, summed over the sources of drafts."""
    runs = _runs(steps, draft)
    proposed, accepted = np.zeros((2, 2, KINDS, MAX_RUN), np.int32)
    (fork,) = np.nonzero(runs.is_drafted & (runs.beside > 0) & (runs.accepted == 0))
    for turn in range(draft):
        at = runs.begun, runs.place + turn
        np.add.at(proposed[DRAFTS], at, runs.accepted >= turn)
        np.add.at(accepted[DRAFTS], at, runs.accepted > turn)
        at = runs.beside[fork], np.full_like(fork, turn)
        np.add.at(proposed[BRANCHES], at, runs.branched[fork] >= turn)
        np.add.at(accepted[BRANCHES], at, runs.branched[fork] > turn)
    # The token after a draft that was right belongs to the run of the step before.
    (behind,) = np.nonzero(runs.last >= 0)
    at = runs.begun[behind - 1], runs.last[behind]
    np.add.at(proposed[DRAFTS], at, 1)
    np.add.at(accepted[DRAFTS], at, runs.goes_on[behind])
    begun, branch_counts = np.zeros(KINDS, np.int32), np.zeros((KINDS, KINDS), np.int32)
    np.add.at(begun, runs.begun, ~runs.goes_on)
    np.add.at(branch_counts, (runs.begun, runs.beside), runs.is_drafted)
    return DraftResult(begun, proposed, accepted, branch_counts, draft * len(steps))


def acceptance_in(steps: Steps, draft: int) -> Acceptance:
    """The acceptance counted in `steps` with drafts of at most `draft` tokens. Tokens that no run
    reached have the prior's."""
    counts = counts_of(steps, draft)
    branch_counts = np.array(PRIOR_BRANCH_COUNTS) + SURE * counts.branch_counts
    return Acceptance(
        counts.begun.astype(float), SURE * counts.proposed, SURE * counts.accepted, branch_counts
    )
