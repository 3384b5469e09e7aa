"""Predictions of ended responses while others are still generated.

Models whose devices do no rollouts read responses as they end, so that an iteration waits for the
last of them only. Knows roles and threads. Does not know what the columns are for.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

import numpy as np

from pat_jax.common.gathering import Gathering, is_any
from pat_jax.rl.batches.types import Rollout

Columns = Mapping[str, Sequence[np.ndarray]]  # by name; of each response, at its tokens
Predict = Callable[[Sequence[Rollout]], Columns]


@dataclass
class Lane:
    """A group of roles on devices that do no rollouts, and the one thread that runs them."""

    thread: Executor
    predict: Predict  # what these roles predict, with their present parameters
    # Whether responses fill micro-batches; fewer wait while others are generated.
    fills: Callable[[Sequence[Rollout]], bool] = is_any


def _fill(fills: Callable[[Sequence[Rollout]], bool], ended: Sequence[tuple[int, Rollout]]) -> bool:
    return fills([rollout for _, rollout in ended])


@dataclass
class EarlyColumns:
    """The columns of one batch of responses, which each lane reads as they end."""

    lanes: Sequence[Lane]
    busy_seconds: float = 0.0  # of all lanes
    waited_seconds: float = 0.0  # after the rewards, for the columns
    columns: Columns = field(default_factory=dict)  # once all are there
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self):
        self._found: dict[str, dict[int, np.ndarray]] = {}
        self._ended = [
            Gathering(lane.thread, partial(self._read, lane.predict), partial(_fill, lane.fills))
            for lane in self.lanes
        ]

    def add(self, index: int, ended: Rollout) -> None:
        """Adds the response `index`, which has ended, and returns at once.

        Raises whatever a lane has raised meanwhile.
        """
        for of_lane in self._ended:
            of_lane.add((index, ended))

    def ask(self) -> None:
        """Has each lane read what waits for it, and returns at once."""
        for of_lane in self._ended:
            of_lane.ask()

    def wait(self, count: int) -> None:
        """Waits for the columns of all `count` responses."""
        start = time.perf_counter()
        for of_lane in self._ended:
            of_lane.wait()
        self.waited_seconds = time.perf_counter() - start
        self.columns = {name: [each[i] for i in range(count)] for name, each in self._found.items()}

    def _read(self, predict: Predict, ended: Sequence[tuple[int, Rollout]]) -> None:
        start = time.perf_counter()
        found = predict([rollout for _, rollout in ended])
        with self._lock:
            self.busy_seconds += time.perf_counter() - start
            for name, values in found.items():
                by_index = self._found.setdefault(name, {})
                by_index |= {i: x for (i, _), x in zip(ended, values, strict=True)}
