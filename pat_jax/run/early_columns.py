"""Predictions of ended responses while others are still generated.

Models whose devices do no rollouts read responses as they end, so that an iteration waits for the
last of them only. Knows roles and threads. Does not know what the columns are for.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from pat_jax.rl.batches.types import Rollout

Columns = Mapping[str, Sequence[np.ndarray]]  # by name; of each response, at its tokens
Predict = Callable[[Sequence[Rollout]], Columns]


@dataclass
class Lane:
    """A group of roles on devices that do no rollouts, and the one thread that runs them."""

    thread: Executor
    predict: Predict  # what these roles predict, with their present parameters


@dataclass
class EarlyColumns:
    """The columns of one batch of responses.

    A lane reads whatever waits for it. While it reads, others end, and it reads these together.
    """

    lanes: Sequence[Lane]
    on_read: Callable[[int], None] = lambda index: None  # called when a lane has read a response
    busy_seconds: float = 0.0  # of all lanes
    waited_seconds: float = 0.0  # after the last response, for the columns
    columns: Columns = field(default_factory=dict)  # once all are there
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self):
        self._waiting: list[list[tuple[int, Rollout]]] = [[] for _ in self.lanes]
        self._tasks: list[Future[None]] = []
        self._found: dict[str, dict[int, np.ndarray]] = {}

    def add(self, index: int, ended: Rollout) -> None:
        """Adds the response `index`, which has ended, and returns at once.

        Raises whatever a lane has raised meanwhile.
        """
        for task in [one for one in self._tasks if one.done()]:
            task.result()
        for number, lane in enumerate(self.lanes):
            with self._lock:
                self._waiting[number].append((index, ended))
                is_due = len(self._waiting[number]) == 1
            if is_due:  # a task that has not begun yet takes this response along
                self._tasks.append(lane.thread.submit(self._read, number))

    def wait(self, count: int) -> None:
        """Waits for the columns of all `count` responses."""
        start = time.perf_counter()
        for task in self._tasks:
            task.result()
        self.waited_seconds = time.perf_counter() - start
        in_order = range(count)
        self.columns = {name: [each[i] for i in in_order] for name, each in self._found.items()}

    def of(self, indices: Sequence[int]) -> Columns:
        """Returns the columns of some responses, which every lane has read."""
        with self._lock:
            return {name: [each[i] for i in indices] for name, each in self._found.items()}

    def _read(self, number: int) -> None:
        with self._lock:
            waiting, self._waiting[number] = self._waiting[number], []
        start = time.perf_counter()
        found = self.lanes[number].predict([rollout for _, rollout in waiting])
        with self._lock:
            self.busy_seconds += time.perf_counter() - start
            for name, values in found.items():
                by_index = self._found.setdefault(name, {})
                by_index |= {i: x for (i, _), x in zip(waiting, values, strict=True)}
        for index, _ in waiting:
            self.on_read(index)
