"""A latency model as dense arrays, so that a whole forecast is priced in a few NumPy calls."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from pat_jax.planning.latency import LatencyModel
from pat_jax.planning.step_model import Physics, Surface
from pat_jax.planning.types import Split

LARGE_S = 1e9  # seconds of what the latency model does not know: never chosen, yet finite


@dataclass(frozen=True)
class CostTables:
    """Seconds over the union of the latency model's row and length buckets.

    A load between two buckets costs what the larger one costs, as in the model itself. Past the
    last bucket decoding and prefilling grow by the model's physics, migrating in proportion.
    """

    splits: tuple[Split, ...]
    rows: np.ndarray  # int[rows], buckets of one data-parallel group
    lengths: np.ndarray  # int[lengths], cache lengths in tokens
    decode: np.ndarray  # [split, rows, lengths], one decode step
    decode_physics: np.ndarray  # [split, part], how it grows past the last bucket
    reslice: np.ndarray  # [from, to]; 0 on the diagonal
    migrate: np.ndarray  # [from, to, rows, lengths]; 0 on the diagonal
    prefill: np.ndarray  # [split, lengths], one call
    prefill_physics: np.ndarray  # [split, part]
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
                [[[latency.decode_step(s, r, n) for n in lengths] for r in rows] for s in splits]
            ),
            _physics(latency.decode, splits),
            reslice,
            migrate,
            np.array([[_known(latency.prefill_call, s, n) for n in lengths] for s in splits]),
            _physics(latency.prefill, splits),
            latency.prefill_rows,
            np.array([latency.chunk(int(n)) for n in lengths]),
        )

    def steps(self, fullest: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Seconds of one decode step with `fullest` rows, both [..., split, moment]."""
        row, length = self._bucket(self.rows, fullest), self._bucket(self.lengths, context)
        bucket = self.rows[row], self.lengths[length]
        load = np.maximum(np.ceil(fullest), bucket[0]), np.maximum(context, bucket[1])
        growth = _seconds(self.decode_physics, *load) / _seconds(self.decode_physics, *bucket)
        return self.decode[np.arange(len(self.splits))[:, None], row, length] * growth

    def migrations(self, fullest: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Seconds, [from, to, moment], of the KV cache of `fullest` rows, [from, moment]."""
        row, length, scale = self._cover(fullest, context)
        source = np.arange(len(self.splits))[:, None, None]
        target = np.arange(len(self.splits))[None, :, None]
        return self.migrate[source, target, row[:, None], length[None, None]] * scale[:, None]

    def recomputations(self, fullest: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Seconds, [to, moment], to prefill `fullest` rows, [to, moment], of `context` tokens."""
        length = self._bucket(self.lengths, context)
        chunk, bucket = self.prefill_chunks[length], self.lengths[length]
        calls = np.ceil(np.ceil(fullest) / self.prefill_rows) * np.ceil(context / chunk)
        at_bucket = _seconds(self.prefill_physics, chunk, bucket)
        growth = _seconds(self.prefill_physics, chunk, np.maximum(context, bucket)) / at_bucket
        return calls * self.prefill[:, length] * growth

    def _cover(
        self, rows: np.ndarray, context: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        row, length = self._bucket(self.rows, rows), self._bucket(self.lengths, context)
        past_rows = np.maximum(1.0, np.ceil(rows) / self.rows[-1])
        return row, length, past_rows * np.maximum(1.0, context / self.lengths[-1])

    @staticmethod
    def _bucket(steps: np.ndarray, needed: np.ndarray) -> np.ndarray:
        return np.minimum(np.searchsorted(steps, needed), len(steps) - 1)


def _physics(surfaces: Mapping[Split, Surface], splits: Sequence[Split]) -> np.ndarray:
    """[split, part]; of a layout that was not measured, nothing that grows."""
    unknown = Physics(1.0, 0.0, 0.0)
    known = [surfaces[split].physics if split in surfaces else unknown for split in splits]
    return np.array([astuple(physics) for physics in known])


def _seconds(physics: np.ndarray, rows: np.ndarray, length: np.ndarray) -> np.ndarray:
    """`Physics` of each split: [..., split, moment]."""
    fixed, per_row, per_token = physics.T[:, :, None]
    return fixed + rows * (per_row + length * per_token)


def _known(seconds, *at) -> float:
    try:
        return seconds(*at)
    except KeyError:
        return LARGE_S
