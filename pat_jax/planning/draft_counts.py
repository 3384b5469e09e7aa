"""The counts that a burst makes of its drafts, on devices and in replays.

A *run* is the text that a draft of unlimited length would predict correctly: see `drafts.py`.
"""

from typing import NamedTuple

import numpy as np

# A kind of match is a range of its length in tokens. These are the first lengths of the ranges.
MATCH_BIN_EDGES = (1, 2, 3, 5, 9, 16)
KINDS = len(MATCH_BIN_EDGES) + 1  # first that of no match
GENERATED = 1  # the kind of drafts that a model generates: each draft is one run
MAX_RUN = 32  # tokens of a run that are counted one by one
DRAFTS, BRANCHES = 0, 1  # indices along an axis of both
# Where copied drafts are from: a response's own text, siblings, responses of earlier iterations.
SOURCES = "own", "siblings", "earlier"
NO_SOURCES = np.zeros((len(SOURCES), 3), np.int64)


class DraftResult(NamedTuple):
    """Counts of a burst's drafted and accepted tokens, by the kind of match with which a run began.

    The arrays that a burst itself returns have an additional first axis of replicas.
    """

    begun: np.ndarray  # int[kinds], number of runs that began with each kind of match
    # int[2, kinds, MAX_RUN], runs and branches whose 1st, 2nd, … token is known to be right or not
    proposed: np.ndarray
    accepted: np.ndarray  # int[2, kinds, MAX_RUN], those whose token was right
    branch_counts: np.ndarray  # int[kinds, kinds], number of steps by the kinds of run and branch
    verified: int | np.ndarray  # number of verified tokens of drafts and branches
    # int[sources, 3], tokens verified, accepted, and accepted on a branch; zeros if drafts are not
    # copied.
    by_source: np.ndarray = NO_SOURCES


# The counts of a burst without drafts, in one replica, as in `RowsOutput`.
NONE_DRAFTED = DraftResult(
    np.zeros((1, KINDS), np.int64),
    np.zeros((1, 2, KINDS, MAX_RUN), np.int64),
    np.zeros((1, 2, KINDS, MAX_RUN), np.int64),
    np.zeros((1, KINDS, KINDS), np.int64),
    np.zeros(1, np.int64),
    NO_SOURCES[None],
)
