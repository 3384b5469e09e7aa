"""A latency model as dense arrays, so that a whole forecast is priced in a few NumPy calls."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pat_jax.planning.latency import LatencyModel
from pat_jax.planning.types import Split

LARGE_S = 1e9  # seconds of what the latency model does not know: never chosen, yet finite


@dataclass(frozen=True)
class CostTables:
    """Seconds over the union of the latency model's row and length buckets.

    A load between two buckets costs what the larger one costs, as in the model itself; past the
    last bucket it grows in proportion.
    """

    splits: tuple[Split, ...]
    rows: np.ndarray  # int[rows], buckets of one data-parallel group
    lengths: np.ndarray  # int[lengths], cache lengths in tokens
    decode: np.ndarray  # [split, rows, lengths], one decode step
    reslice: np.ndarray  # [from, to]; 0 on the diagonal
    migrate: np.ndarray  # [from, to, rows, lengths]; 0 on the diagonal
    prefill: np.ndarray  # [split, lengths], one call
    prefill_rows: int
    prefill_chunks: np.ndarray  # int[lengths], tokens a row of one call

    @classmethod
    def of(cls, latency: LatencyModel, splits: Sequence[Split]) -> "CostTables":
        rows = np.array(sorted({n for split, n, _ in latency.decode_table if split in splits}))
        lengths = np.array(sorted({n for split, _, n in latency.decode_table if split in splits}))
        pairs = [(i, j) for i in range(len(splits)) for j in range(len(splits)) if i != j]
        reslice = np.zeros((len(splits),) * 2)
        migrate = np.zeros((*reslice.shape, len(rows), len(lengths)))
        for i, j in pairs:
            pair = splits[i], splits[j]
            reslice[i, j] = latency.reslice_table.get(pair, LARGE_S)
            migrate[i, j] = [[_known(latency.migrate, *pair, r, n) for n in lengths] for r in rows]
        return cls(
            tuple(splits),
            rows,
            lengths,
            np.array(
                [
                    [[_known(latency.decode_step, s, r, n) for n in lengths] for r in rows]
                    for s in splits
                ]
            ),
            reslice,
            migrate,
            np.array([[_known(latency.prefill_call, s, n) for n in lengths] for s in splits]),
            latency.prefill_rows,
            np.array([math.gcd(latency.prefill_chunk, int(n)) for n in lengths]),
        )

    def steps(self, fullest: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Seconds of one decode step with `fullest` rows, both [..., split, moment]."""
        row, length, scale = self._cover(fullest, context)
        return self.decode[np.arange(len(self.splits))[:, None], row, length] * scale

    def migrations(self, fullest: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Seconds, [from, to, moment], of the KV cache of `fullest` rows, [from, moment]."""
        row, length, scale = self._cover(fullest, context)
        source = np.arange(len(self.splits))[:, None, None]
        target = np.arange(len(self.splits))[None, :, None]
        return self.migrate[source, target, row[:, None], length[None, None]] * scale[:, None]

    def recomputations(self, fullest: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Seconds, [to, moment], to prefill `fullest` rows, [to, moment], of `context` tokens."""
        length = self._bucket(self.lengths, context)
        row_calls = np.ceil(np.ceil(fullest) / self.prefill_rows)
        return row_calls * np.ceil(context / self.prefill_chunks[length]) * self.prefill[:, length]

    def _cover(
        self, rows: np.ndarray, context: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        row, length = self._bucket(self.rows, rows), self._bucket(self.lengths, context)
        past_rows = np.maximum(1.0, np.ceil(rows) / self.rows[-1])
        return row, length, past_rows * np.maximum(1.0, context / self.lengths[-1])

    @staticmethod
    def _bucket(steps: np.ndarray, needed: np.ndarray) -> np.ndarray:
        return np.minimum(np.searchsorted(steps, needed), len(steps) - 1)


def _known(seconds, *at) -> float:
    try:
        return seconds(*at)
    except KeyError:
        return LARGE_S
