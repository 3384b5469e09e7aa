"""What bursts count of drafts: kinds and places that devices, plans and replays tell apart.

A *run* is what a draft without end would get right at once: see `drafts.py`.
"""

from typing import NamedTuple

import numpy as np

# Matches of so many tokens and more are a kind of their own; shorter ones than the first are none.
MATCH_BIN_EDGES = (1, 2, 3, 5, 9, 16)
KINDS = len(MATCH_BIN_EDGES) + 1  # none first
GENERATED = 1  # the kind of drafts that a model generates, each of which is a run of its own
MAX_RUN = 32  # tokens of a run that are told apart
DRAFTS, BRANCHES = 0, 1  # places of what is known of both
# What a draft is copied from: a response's own text, others to its prompt, responses of earlier iterations.
SOURCES = "own", "siblings", "earlier"
NO_SOURCES = np.zeros((len(SOURCES), 3), np.int64)


class DraftResult(NamedTuple):
    """What came of the drafts of a burst, by the kind of match with which runs began.

    What a burst itself tells has a first axis more, of replicas.
    """

    begun: np.ndarray  # int[kinds], runs
    # int[2, kinds, MAX_RUN], runs that came to each token and had it drawn, and branches that did.
    proposed: np.ndarray
    accepted: np.ndarray  # int[2, kinds, MAX_RUN], where it was right
    branch_counts: np.ndarray  # int[kinds, kinds], steps by the kind of the run and of the branch
    verified: int | np.ndarray  # tokens of drafts and branches
    # int[sources, 3], of these, of those that were accepted, and of those accepted on a branch;
    # none of drafts that are not copied.
    by_source: np.ndarray = NO_SOURCES


# Of the one replica of a burst that drafts nothing, as `RowsOutput` has it.
NONE_DRAFTED = DraftResult(
    np.zeros((1, KINDS), np.int64),
    np.zeros((1, 2, KINDS, MAX_RUN), np.int64),
    np.zeros((1, 2, KINDS, MAX_RUN), np.int64),
    np.zeros((1, KINDS, KINDS), np.int64),
    np.zeros(1, np.int64),
    NO_SOURCES[None],
)
