"""Gradients of complete groups while other responses are still generated.

A group is complete when all its responses have ended and have their rewards and columns. Its
gradient is then added up with those of earlier groups, by the thread of the role's devices. Tokens
are weighted as if each group were alone, times its share; the sum is divided by all shares at the
end. So the result is the gradient of the whole batch, if no advantage depends on other groups.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from threading import Lock

from pat_jax.rl.batches.batches import TrainBatch
from pat_jax.training.summed_gradients import SummedGradients
from pat_jax.training.trainer import Trainer

# Of complete groups, by their indices: what is learned from, and their share.
MakeBatch = Callable[[Sequence[int]], tuple[TrainBatch, float]]
Begin = Callable[[], SummedGradients]


@dataclass(frozen=True)
class TrainedRole:
    """A trained role, the thread of its devices, and what begins the sum of an iteration."""

    role: Trainer
    thread: Executor
    begin: Begin


@dataclass
class EarlyGradients:
    """The gradients of one batch of groups.

    Args:
      parts: number of events after which a group is complete, for each of its responses one of its
        reward and one of each lane that predicts columns.
      make_batch: called on the threads of roles.
    """

    roles: Sequence[TrainedRole]
    num_groups: int
    parts: int
    make_batch: MakeBatch
    busy_seconds: float = 0.0  # of all roles
    waited_seconds: float = 0.0  # after the last reward, for the gradients
    summed: Mapping[str, SummedGradients] = field(
        default_factory=dict
    )  # by role; once all are there
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self):
        self._missing = [self.parts] * self.num_groups
        self._waiting: list[list[int]] = [[] for _ in self.roles]
        self._sums: dict[str, SummedGradients] = {}
        self._tasks: list[Future[None]] = []

    def note(self, group: int) -> None:
        """Notes one event of a group. Any thread may call it."""
        with self._lock:
            self._missing[group] -= 1
            if self._missing[group]:
                return
            for number, one in enumerate(self.roles):
                self._waiting[number].append(group)
                if len(self._waiting[number]) == 1:  # else a task that has not begun takes it along
                    self._tasks.append(one.thread.submit(self._add, number))

    def wait(self) -> None:
        """Waits for the gradients of all groups."""
        start = time.perf_counter()
        assert not any(self._missing), "a group is not complete"
        for task in self._tasks:
            task.result()
        self.summed, self.waited_seconds = self._sums, time.perf_counter() - start

    def _add(self, number: int) -> None:
        with self._lock:
            waiting, self._waiting[number] = self._waiting[number], []
        start, one = time.perf_counter(), self.roles[number]
        batch, share = self.make_batch(waiting)
        name = one.role.name
        if name not in self._sums:
            self._sums[name] = one.begin()
        self._sums[name].add(batch, share)
        with self._lock:
            self.busy_seconds += time.perf_counter() - start
