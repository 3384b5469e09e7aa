"""How many bytes of a device each layout takes, how many pages that leaves, where there is room.

Knows bytes and the engine's order of moves. Does not know arrays, where a limit is from, or what it
costs that pages are few (`pool_pressure.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pat_jax.planning.types import Split

USABLE = 0.9  # of a device's memory: the rest is left to what programs need while they run
GIB = 2**30


def beside(arrays: int, temporaries: int, limit: float) -> int:
    """Bytes of a device's usable part that a program takes, of `limit` in all."""
    return arrays + int(max(0.0, temporaries - (1 - USABLE) * limit))


@dataclass(frozen=True)
class MemoryModel:
    """Bytes of one device by split, and the pages that they buy.

    The KV cache is a pool of pages that is as large at the first token as at the last. A device has
    one replica's.
    """

    limit: float  # bytes that a device has; infinite where it is not known
    resident: int  # bytes of what training keeps there during a rollout
    weights: Mapping[Split, int]
    page: Mapping[Split, int]  # of one page
    pages: Mapping[Split, int]  # of one replica's pool, NULL_PAGE among them
    page_size: int  # tokens
    chunk: int  # bytes, over all devices, of the weights that are resharded at once
    staging: int  # bytes of pages on their way from one layout to another, at most
    ahead: int  # tokens that a context needs room for beside its own
    # Of bursts with drafts, nothing where there are none: what drafts come from, and temporaries of a step.
    draft_sources: Mapping[Split, int] = field(default_factory=dict)
    draft_steps: Mapping[Split, int] = field(default_factory=dict)

    @property
    def usable(self) -> float:
        return USABLE * self.limit

    def pool(self, split: Split) -> int:
        return self.page[split] * self.pages[split]

    def held(self, split: Split) -> int:
        """Bytes while it decodes, whatever is running."""
        return self.resident + self.weights[split] + self.pool(split) + self.drafted(split)

    def drafted(self, split: Split) -> int:
        """Bytes that the largest burst with drafts needs beside these: what they come from, and
        what of its temporaries does not fit where those of all programs have room."""
        source, steps = self.draft_sources.get(split, 0), self.draft_steps.get(split, 0)
        return beside(source, steps, self.limit)

    def starting(self, split: Split, sequences: int, prompt: int) -> int:
        """Bytes for that many sequences with prompts of `prompt` tokens, and nothing more."""
        rows, tokens = np.array(-(-sequences // split.dp)), np.array(prompt + self.ahead)
        pages = int(self.needed(rows, tokens)) + 1
        held = self.resident + self.weights[split] + self.drafted(split)
        return held + self.page[split] * pages

    def needed(self, fullest: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Pages of the fullest replica for `fullest` sequences of `tokens`."""
        return np.ceil(fullest) * np.ceil(tokens / self.page_size)

    def has_room(self, splits: Sequence[Split]) -> np.ndarray:
        """Whether weights and pool fit, bool[split]; where none fits, True for the nearest."""
        held = np.array([self.held(split) for split in splits])
        return held <= max(self.usable, held.min())

    def may_switch(self, splits: Sequence[Split]) -> np.ndarray:
        """Where there is room to go and to be, bool[from, to]."""
        return self.has_room(splits) & (self._peaks(splits) <= self.usable)

    def _peaks(self, splits: Sequence[Split]) -> np.ndarray:
        """Most bytes of a switch, [from, to].

        A reshard frees each old leaf once its new one is there, so the larger of the two sets of
        weights and one chunk are the most it holds, while pages are still on their way in the pool. No
        burst runs at the time, but what it drafts from lies there still.
        """
        weights = np.array([self.weights[split] for split in splits])
        tp, pool = np.array([split.tp for split in splits]), max(map(self.pool, splits))
        chunk = self.chunk // np.minimum(tp[:, None], tp)
        held = self.resident + np.maximum(weights[:, None], weights)
        drafted = max(self.draft_sources.values(), default=0)
        return held + chunk + pool + self.staging + drafted
