"""A forecast for pools that are too small for all sequences at once: some wait for pages.

Knows tokens and pools. Does not know what a step costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pat_jax.planning.memory import MemoryModel
from pat_jax.planning.planner.forecast import Forecast
from pat_jax.planning.types import Split


@dataclass(frozen=True)
class PoolPressure:
    """A forecast for each layout, given the size of its pools. A moment is reached when all
    sequences have made a number of steps, which takes longer with small pools."""

    steps: np.ndarray  # float[splits, moments], decode steps until the next moment
    running: np.ndarray  # float[splits, moments], sequences that run at once
    rows: np.ndarray  # float[outcomes, splits, moments], sequences running in the fullest replica
    context: np.ndarray  # float[splits, moments], tokens in the cache of the longest sequence
    again: np.ndarray  # float[splits, moments], sequences recomputed in each step

    @classmethod
    def of(
        cls, forecast: Forecast, splits: Sequence[Split], memory: MemoryModel | None
    ) -> "PoolPressure":
        """Returns `forecast` for the pools of `memory`; if None, they hold every sequence."""
        pressure = np.ones(forecast.fullest.shape[1:])
        if memory is not None:
            pressure = _pressure(forecast, splits, memory)
        steps = pressure * forecast.steps
        even = forecast.running / _dp(splits)
        rows = even / pressure + (forecast.fullest - even) / np.sqrt(pressure)
        # The first to begin runs at every step, so the longest are ahead of the average.
        ahead = np.cumsum(steps - forecast.steps, axis=1) - (steps - forecast.steps)
        longest = forecast.context[forecast.any_running > 0.5].max()
        context = np.maximum(np.minimum(forecast.context + ahead, longest), forecast.context)
        # As far as pools overflow, each new token takes the place of one to be recomputed.
        is_full = np.maximum(0.0, 1 - 1 / pressure)
        running = forecast.running / pressure
        again = is_full * running / np.maximum(forecast.mean_context, 1)
        return cls(steps, running, np.maximum(rows, 1), context, again)


def _pressure(forecast: Forecast, splits: Sequence[Split], memory: MemoryModel) -> np.ndarray:
    """Returns the steps that it takes until each running sequence has made one, float[splits,
    moments]. If sequences need more than the pools, some wait while others run. The tokens that
    they hold, summed over all steps, are the same no matter who waits: if they need k times the
    pools, there are k times the steps, with fewer rows each. The result is below one if others wait
    and will find room because each sequence holds less than now."""
    pools = np.array([memory.page_size * (memory.pages[split] - 1) for split in splits])
    each = forecast.mean_context + memory.page_size / 2  # the last page is half empty
    # On average half a sequence's pages stay free: too few for the next one.
    room = np.maximum(pools[:, None] - each / 2, each)
    pressure = forecast.running * each / (_dp(splits) * room)
    least = np.where(forecast.is_pressed, np.minimum(1.0, each / each[0]), 1.0)
    return np.maximum(least, pressure)


def _dp(splits: Sequence[Split]) -> np.ndarray:
    return np.array([split.dp for split in splits])[:, None]
