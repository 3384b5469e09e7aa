"""How many bytes of a device each layout takes, and which layouts can hold a load.

Knows bytes, buckets and the engine's order of moves. Does not know arrays or where a limit is from.
"""

import math
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

    run: np.ndarray  # bool[split, moments]: decoding on to the next moment
    reslice: np.ndarray  # bool[from, to, moments]: the weights and the new KV cache
    migrate: np.ndarray  # bool[from, to, moments]: the old KV cache and the new one at once
    recompute: np.ndarray  # bool[to, moments]: the new KV cache and the one that prefills it


@dataclass(frozen=True)
class MemoryModel:
    """Bytes of one device by split.

    A KV cache is never resized in place: it and the next smaller bucket, which it grew from or will
    be compacted to, are held at once. A device has one data-parallel group's rows.
    """

    limit: float  # bytes that a device has; infinite where nobody says
    resident: int  # bytes of what training keeps there during a rollout
    weights: Mapping[Split, int]
    token: Mapping[Split, int]  # of one token of one row in the KV cache
    rows: Mapping[Split, tuple[int, ...]]  # row buckets of one data-parallel group
    lengths: tuple[int, ...]  # length buckets, tokens
    prefill_rows: int  # rows of a group that are prefilled at once
    chunk: int  # bytes, over all devices, of the weights that are re-sliced at once
    ahead: int  # tokens that must fit on top of a context, else the cache grows

    @property
    def is_limited(self) -> bool:
        return self.limit < math.inf

    @property
    def usable(self) -> float:
        return USABLE * self.limit

    def running(self, split: Split, fullest: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Bytes to decode with `fullest` rows in the fullest group and caches of `tokens`."""
        rows, fewer = self._buckets(self.rows[split], fullest)
        length, shorter = self._buckets(self.lengths, tokens)
        cache = rows * length + np.maximum(fewer * length, rows * shorter)
        return self.resident + self.weights[split] + self.token[split] * cache

    def prefilling(self, split: Split, fullest: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Bytes to prefill as many rows."""
        rows, length = self._buckets(self.rows[split], fullest)[0], self._length(tokens)
        cache = (rows + self.prefill_rows) * length
        return self.resident + self.weights[split] + self.token[split] * cache

    def holds(self, split: Split, rows: int, length: int) -> bool:
        """Whether there is room for one bucket."""
        return bool(self.running(split, np.array(rows), np.array(length)) <= self.usable)

    def starting(self, split: Split, sequences: int, prompt: int) -> int:
        """Bytes to begin a rollout of that many sequences with prompts of `prompt` tokens."""
        rows, tokens = np.array(-(-sequences // split.dp)), np.array(prompt + self.ahead)
        begin = self.prefilling(split, rows, tokens), self.running(split, rows, tokens)
        return int(np.maximum(*begin))

    def ending(self, split: Split, sequences: int) -> int:
        """Bytes if every sequence grew as long as it may."""
        rows = np.array(-(-sequences // split.dp))
        return int(self.running(split, rows, np.array(self.lengths[-1])))

    def fits(self, splits: tuple[Split, ...], forecast: Forecast, last: int) -> Fits:
        """Where there is room for what a forecast expects.

        Where there is none in any layout, the one that needs least may run: somewhere it must.

        Args:
          last: tokens in the longest cache when its sequence has used up its budget.
        """
        fullest, now = forecast.fullest[0], np.minimum(forecast.context + self.ahead, last)
        ahead = forecast.context + np.maximum(forecast.steps, self.ahead)
        pairs = list(zip(splits, fullest, strict=True))
        need = np.stack([self.running(s, rows, np.minimum(ahead, last)) for s, rows in pairs])
        run = need <= self.usable
        run[need.argmin(axis=0), np.arange(need.shape[1])] |= ~run.any(axis=0)
        prefill = np.stack([self.prefilling(s, rows, now) for s, rows in pairs])
        reslice, migrate = self._switches(splits, fullest, now)
        return Fits(run, reslice <= self.usable, migrate <= self.usable, prefill <= self.usable)

    def _switches(
        self, splits: tuple[Split, ...], fullest: np.ndarray, tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Peaks of a switch by recomputing and of one by migrating, bytes[from, to, moments].

        A re-slice frees each old leaf once its new one is there, so the larger of the two sets of
        weights and one chunk are the most it holds. It runs while pages are still on their way from
        one cache to the other; a cache to be recomputed is given up before.
        """
        length = self._length(tokens)
        rows = np.stack(
            [self._buckets(self.rows[s], n)[0] for s, n in zip(splits, fullest, strict=True)]
        )
        dp, tp = (np.array([s[k] for s in splits]) for k in range(2))
        token, weights = (np.array([x[s] for s in splits]) for x in (self.token, self.weights))
        old = (rows * token[:, None] * length)[:, None]
        arriving = np.ceil(rows[:, None] * (dp[:, None] / dp)[:, :, None])
        new = arriving * token[:, None] * length
        chunk = self.chunk // np.minimum(tp[:, None], tp)
        held = self.resident + np.maximum(weights[:, None], weights) + chunk
        return held[:, :, None] + new, held[:, :, None] + old + new

    def _length(self, tokens: np.ndarray) -> np.ndarray:
        return self._buckets(self.lengths, tokens)[0]

    @staticmethod
    def _buckets(steps: tuple[int, ...], needed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The bucket that holds `needed` (past the last one, the last) and the one below it, or 0."""
        with_none = np.array((0, *steps))
        at = np.minimum(np.searchsorted(with_none, np.maximum(np.ceil(needed), 1)), len(steps))
        return with_none[at], with_none[at - 1]
