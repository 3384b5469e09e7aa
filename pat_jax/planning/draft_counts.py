"""What bursts count of their drafts: the kinds and places that devices, plans and replays tell apart.

A *run* is what a draft without end would get right at once: see `drafts.py`.
"""

from typing import NamedTuple

import numpy as np

# Matches of so many tokens and more are a kind of their own; shorter ones than the first are none.
MATCHES = (1, 2, 3, 5, 9, 16)
KINDS = len(MATCHES) + 1  # none first
SAID = 1  # the kind of drafts that a model says, each of which is a run of its own
MOST = 32  # tokens of a run that are told apart
DRAFTS, BRANCHES = 0, 1  # places of what is known of both
# What a draft is copied from: a response's own text, others to its prompt, responses of earlier iterations.
SOURCES = "own", "siblings", "earlier"
NO_SOURCES = np.zeros((len(SOURCES), 3), np.int64)


class Drafted(NamedTuple):
    """What came of the drafts of a burst, by the kind of match with which runs began.

    What a burst itself tells has a first axis more, of groups.
    """

    begun: np.ndarray  # int[kinds], runs
    # int[2, kinds, MOST], runs that came to each token and had it drawn, and branches that did.
    tried: np.ndarray
    right: np.ndarray  # int[2, kinds, MOST], where it was right
    forks: np.ndarray  # int[kinds, kinds], steps by the kind of the run and of the branch
    verified: int | np.ndarray  # tokens of drafts and branches
    # int[sources, 3], of these, of those that were said, and of those said on a branch; none of drafts that are
    # not copied.
    by_source: np.ndarray = NO_SOURCES


# Of the one group of a burst that drafts nothing, as `RowsOutput` has it.
NONE_DRAFTED = Drafted(
    np.zeros((1, KINDS), np.int64),
    np.zeros((1, 2, KINDS, MOST), np.int64),
    np.zeros((1, 2, KINDS, MOST), np.int64),
    np.zeros((1, KINDS, KINDS), np.int64),
    np.zeros(1, np.int64),
    NO_SOURCES[None],
)
