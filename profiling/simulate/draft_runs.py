"""The runs that verification steps are parts of, as the engine counts them (`planning/drafts.py`)."""

from typing import NamedTuple

import numpy as np

from pat_jax.engine.device.suffix import CONTEXT
from pat_jax.planning.drafts import BRANCHES, DRAFTS, KINDS, MATCHES, MOST, Drafted
from pat_jax.profiling.simulate.draft_counting import Steps


class InRuns(NamedTuple):
    """What the engine knows of each step (`engine/device/lines.py`), in the order of rows and their steps."""

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
        begun = np.searchsorted(MATCHES, steps.matched, side="right")[first]
        place = np.minimum((np.arange(len(steps)) - first) * (draft + 1), MOST - draft)
        last = np.where(needed > 0, np.minimum(np.roll(place, 1) + draft + 1, MOST) - 1, -1)
        beside = np.searchsorted(MATCHES, steps.beside, side="right")
        branches = beside, steps.branched, steps.matched > 0
        return cls(steps.step, steps.accepted, begun, place, goes_on, last, *branches)

    def counts(self, draft: int, chosen: np.ndarray) -> Drafted:
        """Of the steps that a mask chooses."""
        tried, right = np.zeros((2, 2, KINDS, MOST), np.int64)
        begun, place, accepted = (x[chosen] for x in (self.begun, self.place, self.accepted))
        drafted = chosen & self.is_drafted
        is_fork = drafted & (self.beside > 0) & (self.accepted == 0)
        beside, branched = self.beside[is_fork], self.branched[is_fork]
        for turn in range(draft):
            np.add.at(tried[DRAFTS], (begun, place + turn), accepted >= turn)
            np.add.at(right[DRAFTS], (begun, place + turn), accepted > turn)
            np.add.at(tried[BRANCHES, :, turn], beside, branched >= turn)
            np.add.at(right[BRANCHES, :, turn], beside, branched > turn)
        # The token behind a draft that was right: of the run of the step before.
        (at,) = np.nonzero(chosen & (self.last >= 0))
        np.add.at(tried[DRAFTS], (self.begun[at - 1], self.last[at]), 1)
        np.add.at(right[DRAFTS], (self.begun[at - 1], self.last[at]), self.goes_on[at])
        runs = np.bincount(self.begun[chosen & ~self.goes_on], minlength=KINDS)
        forks = np.zeros((KINDS, KINDS), np.int64)
        np.add.at(forks, (self.begun[drafted], self.beside[drafted]), 1)
        return Drafted(runs, tried, right, forks, draft * int(chosen.sum()))


def counts_of(steps: Steps, draft: int) -> Drafted:
    return InRuns.of(steps, draft).counts(draft, np.ones(len(steps), bool))
