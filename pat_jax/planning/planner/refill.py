"""Adds waiting sequences to a forecast: they fill rows that become free.

The sequences that get rows at one moment are one class of the forecast. A long queue counts only up
to the length that fills all rows `MOST_TURNS` times. The rest is far off. If it counted, the
moments would be too far apart to predict the end.
"""

from dataclasses import dataclass

import numpy as np

from pat_jax.planning.lengths.model import LengthModel, mean_moments, mean_tokens
from pat_jax.planning.types import Load

MOST_TURNS = 8


@dataclass(frozen=True)
class Refill:
    """The waiting sequences that get a row at each moment, on average."""

    count: np.ndarray  # float[moments], sequences
    context: np.ndarray  # int[moments], tokens in the cache of each, had they begun now
    survive: np.ndarray  # float[moments, moments], P(running at the second | admitted at the first)
    is_queued: np.ndarray  # bool[moments], whether sequences wait, so that all rows are full


def mean_response(load: Load, lengths: LengthModel) -> float:
    """Returns the predicted mean tokens of responses not begun yet, each cut at its limit."""
    remaining_tokens = _remaining_tokens(load)
    moments = mean_moments(remaining_tokens)
    alive = lengths.survival(np.zeros(1, int), np.array([remaining_tokens]), moments)
    return float(mean_tokens(alive, moments)[0])


def horizon(load: Load, lengths: LengthModel) -> int:
    """Returns the decode steps until the last sequence may end, if waiting sequences have the mean
    response length."""
    if not load.waiting:
        return int(load.remaining_tokens.max())
    return int(_queue(load) / load.running * mean_response(load, lengths)) + _remaining_tokens(load)


def refill(load: Load, lengths: LengthModel, running: np.ndarray, moments: np.ndarray) -> Refill:
    """Predicts how many waiting sequences get a row at each moment, because running sequences have
    ended.

    Args:
      running: float[moments], how many of the sequences running now will still run.
      moments: int[moments], steps from now.
    """
    between = np.maximum(moments[None, :] - moments[:, None], 0)
    after, where = np.unique(between, return_inverse=True)
    alive = lengths.survival(np.zeros(1, int), np.array([_remaining_tokens(load)]), after)[0]
    survive = np.triu(alive[where.reshape(len(moments), -1)])
    mean = mean_response(load, lengths)
    steps = np.diff(moments, prepend=0)
    count = np.zeros(len(moments))
    is_queued = np.zeros(len(moments), bool)
    running = running.astype(float)
    left = _queue(load)
    for j in range(len(moments)):
        free = min(max(load.running - running[j], 0.0), left)
        count[j] = free
        running += free * survive[j]
        # Some of these rows became free more than once since the last moment.
        left = max(left - free * (1 + steps[j] / (2 * mean)), 0.0)
        is_queued[j] = left > 0
    survive *= (count > 0)[:, None]
    prompt = (load.context - load.generated).mean()
    return Refill(count, np.rint(prompt - moments).astype(int), survive, is_queued)


def _queue(load: Load) -> float:
    """Returns how many waiting sequences count: at most `MOST_TURNS` for each running one."""
    return float(min(load.waiting, MOST_TURNS * load.running))


def _remaining_tokens(load: Load) -> int:
    """Returns the tokens that a sequence that waits may sample."""
    return int((load.generated + load.remaining_tokens).max())
