"""A latency model as dense arrays, to price a whole forecast in a few NumPy calls."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import permutations

import numpy as np

from pat_jax.planning.latency.model import ROUNDS, LatencyModel
from pat_jax.planning.latency.step_model import Physics, Surface, migration
from pat_jax.planning.types import Reads, Split

LARGE_S = 1e9  # seconds if the latency model has none: never chosen, yet finite


@dataclass(frozen=True)
class CostTables:
    """Seconds of a latency model, as arrays over all its row buckets and length buckets.

    A load between two buckets costs what the larger one costs, as in the model itself. Past the
    last bucket times grow by the model's physics.
    """

    splits: tuple[Split, ...]
    rows: np.ndarray  # int[rows], buckets of one replica
    lengths: np.ndarray  # int[lengths], cache lengths in tokens
    decode: np.ndarray  # [split, rows, lengths], one decode step
    decode_physics: np.ndarray  # [split, part of `Physics`], its growth past the last bucket
    reshard: np.ndarray  # [from, to]; 0 on the diagonal
    migrate: np.ndarray  # [ROUNDS, from, to], one round; 0 on the diagonal
    round_tokens: int  # tokens of a replica that one round moves
    prefill: np.ndarray  # [split, lengths], one call
    prefill_physics: np.ndarray  # [split, part]
    prefill_blocks: int  # pages of a replica that one call computes
    page_size: int  # tokens of a page
    capacity: int  # sequences that have rows at once, whatever the layout
    reads: Reads
    latency: LatencyModel
    # Tables of steps that verify drafts, by number of draft tokens; rows up to those measured.
    verifying: tuple[tuple[int, "CostTables"], ...] = ()

    @classmethod
    def of(cls, latency: LatencyModel, splits: Sequence[Split]) -> "CostTables":
        rows = np.array(sorted({n for split, n, _ in latency.decode_table if split in splits}))
        lengths = np.array(sorted({n for split, _, n in latency.decode_table if split in splits}))
        reshard = np.zeros((len(splits),) * 2)
        migrate = np.zeros((len(ROUNDS), *reshard.shape))
        for i, j in permutations(range(len(splits)), 2):
            pair = splits[i], splits[j]
            reshard[i, j] = latency.reshard_table.get(pair, LARGE_S)
            migrate[:, i, j] = [latency.migrate_table.get((*pair, n), LARGE_S) for n in ROUNDS]
        decode = [
            [[_known(latency.decode_step, s, r, n) for n in lengths] for r in rows] for s in splits
        ]
        return cls(
            tuple(splits),
            rows,
            lengths,
            np.array(decode),
            _physics(latency.decode, splits),
            reshard,
            migrate,
            latency.round_tokens,
            np.array([[_known(latency.prefill_call, s, n) for n in lengths] for s in splits]),
            _physics(latency.prefill, splits),
            latency.prefill_blocks,
            latency.page_size,
            min((s.dp * x.rows[-1] for s, x in latency.decode.items() if s in splits), default=0),
            latency.reads,
            latency,
            tuple(
                (n, cls.of(latency.verifying(n), splits))
                for n in latency.num_draft_tokens
                if any(at[0] in splits and at[-1] == n for at in latency.verify_table)
            ),
        )

    def steps(
        self,
        fullest: np.ndarray,
        context: np.ndarray,
        mean: np.ndarray,
        running: np.ndarray | float = math.inf,
    ) -> np.ndarray:
        """Returns the seconds of one decode step at each moment of a forecast, [..., split,
        moment], as `LatencyModel.decode_step`.

        Args:
          fullest: rows of the fullest replica, [..., split, moment].
          context: most tokens in the cache of a row.
          mean: mean tokens in the cache of a row.
          running: sequences of all replicas, [split, moment].
        """
        row = self._bucket(self.rows, fullest)
        rows = np.maximum(np.ceil(fullest), self.rows[row])
        dp = np.array([split.dp for split in self.splits])[:, None]
        spared = self.latency.spared(dp * rows, running)
        if self.reads == "bucket":
            length = self._bucket(self.lengths, context)
            return self._steps(row, rows, np.maximum(context, self.lengths[length])) - spared
        held = fullest * mean
        seconds = self._steps(row, rows, held / rows)
        if self.rows[0] > 1:
            return seconds - spared
        alone = self._steps(0 * row, np.ones_like(rows), np.minimum(context, held))
        return np.maximum(seconds, alone) - spared

    def _steps(self, row: np.ndarray, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Returns the seconds with `tokens` in each of `rows` rows, which run in bucket `row`."""
        last = len(self.lengths) - 1
        high = np.clip(np.searchsorted(self.lengths, tokens), min(1, last), last)
        low = np.maximum(high - 1, 0)
        known = np.clip(tokens, self.lengths[0], self.lengths[-1])
        width = np.maximum(self.lengths[high] - self.lengths[low], 1)
        share = np.where(high > low, (known - self.lengths[low]) / width, 0.0)
        split = np.arange(len(self.splits))[:, None]
        shorter, longer = (self.decode[split, row, length] for length in (low, high))
        # A single length does not show what fewer tokens cost.
        growth = _seconds(self.decode_physics, rows, tokens if last else np.maximum(tokens, known))
        growth = growth / _seconds(self.decode_physics, self.rows[row], known)
        return ((1 - share) * shorter + share * longer) * growth

    def migrations(
        self, fullest: np.ndarray, running: np.ndarray, context: np.ndarray
    ) -> np.ndarray:
        """Returns the seconds to migrate the KV cache at each moment, [from, to, moment]. `fullest`
        and `running` are numbers of sequences, [from, moment]."""
        dp = np.array([split.dp for split in self.splits])
        everybody, one = self.migrate[..., None]
        seconds = migration(
            dp[:, None, None], dp[:, None], everybody, one, fullest[:, None], running[:, None]
        )
        return seconds * (context / self.round_tokens)

    def recomputations(self, fullest: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Returns the seconds to prefill `fullest` rows of `context` tokens, all [to, moment]."""
        rows = np.ceil(fullest)
        tokens = self.page_size * self.prefill_blocks
        calls = np.ceil(rows * np.ceil(context / self.page_size) / self.prefill_blocks)
        # Lower positions come first: the calls done once rows are as long as each bucket.
        bucket = self.lengths[:, None, None]
        over = np.where(bucket < context, np.floor(rows * bucket / tokens), calls)
        # The sum of (over[k] - over[k - 1]) · prefill[k], by parts: the differences of a small table.
        falls = self.prefill.copy()
        falls[:, :-1] -= self.prefill[:, 1:]
        seconds = np.einsum("kst,sk->st", over, falls)
        last = np.array(self.lengths[-1])
        blocks = np.array(self.prefill_blocks)
        growth = _seconds(self.prefill_physics, blocks, np.maximum(context, last))
        growth /= _seconds(self.prefill_physics, blocks, np.maximum(0 * context, last))
        return seconds + (calls - over[-1]) * self.prefill[:, -1, None] * growth

    def is_within_bucket(self, before: np.ndarray, after: np.ndarray) -> bool:
        """Returns whether a move keeps the fullest replica's row bucket. `before` and `after` have
        the replica of each sequence, int[running]."""
        fullest = np.array([np.bincount(replica).max() for replica in (before, after)])
        return len(np.unique(np.searchsorted(self.rows, fullest))) == 1

    @staticmethod
    def _bucket(steps: np.ndarray, needed: np.ndarray) -> np.ndarray:
        return np.minimum(np.searchsorted(steps, needed), len(steps) - 1)


def _physics(surfaces: Mapping[Split, Surface], splits: Sequence[Split]) -> np.ndarray:
    """Returns the parts of each layout's `Physics`, [split, part]; constant if unmeasured."""
    unknown = Physics(1.0, 0.0, 0.0)
    known = [surfaces[split].physics if split in surfaces else unknown for split in splits]
    return np.array([astuple(physics) for physics in known])


def _seconds(physics: np.ndarray, rows: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Returns the seconds by the `Physics` of each layout, [..., split, moment]."""
    fixed, per_row, per_token = physics.T[:, :, None]
    return fixed + rows * (per_row + length * per_token)


def _known(seconds, *at) -> float:
    try:
        return seconds(*at)
    except KeyError:
        return LARGE_S
