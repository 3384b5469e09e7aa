"""Device memory of each layout: the bytes it takes, its pages, and whether it fits.

Knows bytes and the order in which a switch moves arrays. Does not know arrays, where the limit
comes from, or what too few pages cost (`drafting.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pat_jax.planning.types import Split

USABLE = 0.9  # of a device's memory: the rest is left to what programs need while they run
GIB = 2**30


def beside(arrays: int, temporaries: int, limit: float) -> int:
    """Returns the bytes of a device's usable memory that a program takes: its `arrays`, and the
    `temporaries` that exceed the part of `limit` that `USABLE` leaves out."""
    return arrays + int(max(0.0, temporaries - (1 - USABLE) * limit))


class DraftBytes(NamedTuple):
    """The bytes per device that drafts need."""

    source: int = 0  # texts to copy from, a draft model with its cache, or the exit head
    steps: int = 0  # temporaries: logits of all tokens that a step verifies, arrays of sampling


@dataclass(frozen=True)
class MemoryModel:
    """Bytes of one device in each layout, and the size of the pool of pages.

    The pool holds the KV cache and never changes its size. A device belongs to one replica, and
    has its share of that replica's pool.
    """

    limit: float  # bytes that a device has; infinite where it is not known
    resident: int  # bytes that training keeps on the device during a rollout
    weights: Mapping[Split, int]  # bytes of a device's part of the weights
    page: Mapping[Split, int]  # bytes of one page
    pages: Mapping[Split, int]  # in a replica's pool, NULL_PAGE included
    page_size: int  # tokens of a page
    chunk: int  # bytes, over all devices, of the weights that are resharded at once
    staging: int  # most bytes of pages in transit from one layout to another
    ahead: int  # tokens beyond its context that a sequence needs room for
    drafts: Mapping[Split, DraftBytes] = field(default_factory=dict)

    @property
    def usable(self) -> float:
        return USABLE * self.limit

    def pool(self, split: Split) -> int:
        return self.page[split] * self.pages[split]

    def held(self, split: Split) -> int:
        """Returns the bytes that the layout takes while it decodes any number of sequences."""
        return self.resident + self.weights[split] + self.pool(split) + self.drafted(split)

    def drafted(self, split: Split) -> int:
        """Returns the bytes that the largest burst with drafts needs in addition: the source of the
        drafts, and the temporaries beyond the memory that is left to all programs."""
        drafts = self.drafts.get(split, DraftBytes())
        return beside(drafts.source, drafts.steps, self.limit)

    def starting(self, split: Split, sequences: int, prompt: int) -> int:
        """Returns the bytes that the layout takes if its pool has just room for `sequences` prompts
        of `prompt` tokens."""
        rows = np.array(-(-sequences // split.dp))
        tokens = np.array(prompt + self.ahead)
        pages = int(self.needed(rows, tokens)) + 1
        held = self.resident + self.weights[split] + self.drafted(split)
        return held + self.page[split] * pages

    def needed(self, fullest: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Returns the pages that the fullest replica needs for `fullest` sequences of `tokens`
        tokens each."""
        return np.ceil(fullest) * np.ceil(tokens / self.page_size)

    def has_room(self, splits: Sequence[Split]) -> np.ndarray:
        """Returns whether each layout fits into memory, bool[layouts]. If none does, the smallest
        is True."""
        held = np.array([self.held(split) for split in splits])
        return held <= max(self.usable, held.min())

    def may_switch(self, splits: Sequence[Split]) -> np.ndarray:
        """Returns whether a switch and the layout after it fit into memory, bool[from, to]. A
        reshard frees each old leaf once its new one is there. So a device holds at most the larger
        of the two sets of weights and one chunk, besides the pool and the pages in transit. No
        burst runs meanwhile, but the source of its drafts stays on the device."""
        weights = np.array([self.weights[split] for split in splits])
        tp = np.array([split.tp for split in splits])
        pool = max(map(self.pool, splits))
        chunk = self.chunk // np.minimum(tp[:, None], tp)
        held = self.resident + np.maximum(weights[:, None], weights)
        of_splits = (self.drafts[split].source for split in splits if split in self.drafts)
        drafted = max(of_splits, default=0)
        most = held + chunk + pool + self.staging + drafted
        return self.has_room(splits) & (most <= self.usable)


def gib(size: float) -> str:
    """Returns bytes as text in GiB."""
    return f"{size / GIB:.3g} GiB"
