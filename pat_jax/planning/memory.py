"""How many bytes of a device each layout takes, and which layouts can hold a load.

Knows bytes, buckets and the engine's order of moves. Does not know arrays or where a limit is from.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pat_jax.planning.forecast import Forecast
from pat_jax.planning.types import Split

USABLE = 0.9  # of a device's memory: the rest is left to what programs need while they run
GIB = 2**30


@dataclass(frozen=True)
class Fits:
    """Where there is room, at each moment of a forecast."""

    run: np.ndarray  # bool[split, moments]: pages to decode on to the next moment
    reslice: np.ndarray  # bool[from, to]: the weights, a chunk of them twice, pages on their way
    carry: np.ndarray  # bool[to, moments]: pages; migrating takes no more than computing them anew


@dataclass(frozen=True)
class MemoryModel:
    """Bytes of one device by split, and the pages that they buy.

    The KV cache is a pool of pages that is as large at the first token as at the last. A device has
    one data-parallel group's.
    """

    limit: float  # bytes that a device has; infinite where nobody says
    resident: int  # bytes of what training keeps there during a rollout
    weights: Mapping[Split, int]
    page: Mapping[Split, int]  # of one page
    pages: Mapping[Split, int]  # of one group's pool, NULL_PAGE among them
    page_size: int  # tokens
    chunk: int  # bytes, over all devices, of the weights that are re-sliced at once
    staging: int  # bytes of pages on their way from one layout to another, at most
    ahead: int  # tokens that a context needs room for beside its own

    @property
    def usable(self) -> float:
        return USABLE * self.limit

    def pool(self, split: Split) -> int:
        return self.page[split] * self.pages[split]

    def held(self, split: Split) -> int:
        """Bytes while it decodes, whatever is live."""
        return self.resident + self.weights[split] + self.pool(split)

    def starting(self, split: Split, sequences: int, prompt: int) -> int:
        """Bytes for that many sequences with prompts of `prompt` tokens, and nothing more."""
        rows, tokens = np.array(-(-sequences // split.dp)), np.array(prompt + self.ahead)
        pages = int(self.needed(rows, tokens)) + 1
        return self.resident + self.weights[split] + self.page[split] * pages

    def needed(self, fullest: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Pages of the fullest group for `fullest` sequences of `tokens`."""
        return np.ceil(fullest) * np.ceil(tokens / self.page_size)

    def holds(self, split: Split, fullest: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Whether the pool has as many pages, nobody preempted."""
        return self.needed(fullest, tokens) < self.pages[split]

    def fits(self, splits: tuple[Split, ...], forecast: Forecast, last: int) -> Fits:
        """Where there is room for what a forecast expects.

        Where there is none in any layout, the one that lacks least may run: somewhere it must.

        Args:
          last: tokens in the longest cache when its sequence has used up its budget.
        """
        fullest, now = forecast.fullest[0], np.minimum(forecast.context + self.ahead, last)
        ahead = forecast.context + np.maximum(forecast.steps, self.ahead)
        pages = np.array([self.pages[split] for split in splits])[:, None]
        free = pages - 1 - self.needed(fullest, np.minimum(ahead, last))
        has_room = np.array([self.held(split) <= self.usable for split in splits])[:, None]
        run = has_room & (free >= 0)
        run[free.argmax(axis=0), np.arange(free.shape[1])] |= ~run.any(axis=0)
        need = self.needed(fullest, now)
        arrives = has_room & (need < pages)
        reslice = self._peaks(splits) <= self.usable
        return Fits(run, reslice, arrives)

    def _peaks(self, splits: tuple[Split, ...]) -> np.ndarray:
        """Most bytes of a switch, [from, to].

        A re-slice frees each old leaf once its new one is there, so the larger of the two sets of
        weights and one chunk are the most it holds, while pages are still on their way in the pool.
        """
        weights = np.array([self.weights[split] for split in splits])
        tp, pool = np.array([split.tp for split in splits]), max(map(self.pool, splits))
        chunk = self.chunk // np.minimum(tp[:, None], tp)
        held = self.resident + np.maximum(weights[:, None], weights)
        return held + chunk + pool + self.staging
