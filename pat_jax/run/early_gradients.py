"""Gradients of complete groups while other responses are still generated.

A group is complete when all its responses have ended and have their rewards and columns. Its
gradient is then added up with those of earlier groups, by the thread of the role's devices. Tokens
are weighted as if each group were alone, times its share; the sum is divided by all shares at the
end. So the result is the gradient of the whole batch, if no advantage depends on other groups.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

from pat_jax.common.gathering import all_if, is_any
from pat_jax.common.hosts.lane_thread import LaneThread
from pat_jax.common.timeline import stage
from pat_jax.planning import stage_names
from pat_jax.rl.batches.batches import TrainBatch
from pat_jax.training.summed_gradients import SummedGradients
from pat_jax.training.trainer import Trainer

# Of complete groups, by their indices: what is learned from, and their share.
MakeBatch = Callable[[Sequence[int]], tuple[TrainBatch, float]]


@dataclass(frozen=True)
class TrainedLane:
    """Trained roles on devices that do no rollouts, and the one thread that runs them."""

    thread: LaneThread
    roles: Sequence[Trainer]


@dataclass
class EarlyGradients:
    """The gradients of one batch of groups.

    Args:
      parts: number of events after which a group is complete, for each of its responses one of its
        reward and one of each lane that predicts columns.
      make_batch: called on the threads of lanes.
      begin: returns the sum of a role's gradients before any group.
      fills: whether complete groups fill micro-batches; fewer wait for others.
    """

    lanes: Sequence[TrainedLane]
    num_groups: int
    parts: int
    make_batch: MakeBatch
    begin: Callable[[Trainer], SummedGradients]
    fills: Callable[[Sequence[int]], bool] = is_any
    busy_seconds: float = 0.0  # of all lanes
    waited_seconds: float = 0.0  # after the last reward, for the gradients
    summed: Mapping[str, SummedGradients] = field(default_factory=dict)  # by role; once all are in
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self):
        self._missing, self._is_over = [self.parts] * self.num_groups, False
        self._sums: dict[str, SummedGradients] = {}
        choose = partial(all_if, self._is_enough)
        self._complete = [
            lane.thread.gathering(partial(self._add, lane.roles), int, choose)
            for lane in self.lanes
        ]

    def ask(self) -> None:
        """From now on complete groups wait for no others."""
        self._is_over = True
        for of_lane in self._complete:
            of_lane.ask()

    def note(self, group: int) -> None:
        """Notes one event of a group. Any thread may call it."""
        with self._lock:
            self._missing[group] -= 1
            is_complete = not self._missing[group]
        if is_complete:
            for of_lane in self._complete:
                of_lane.add(group)

    def wait(self) -> None:
        """Waits for the gradients of all groups."""
        start = time.perf_counter()
        assert not any(self._missing), "a group is not complete"
        for of_lane in self._complete:
            of_lane.wait()
        self.summed, self.waited_seconds = self._sums, time.perf_counter() - start

    def _is_enough(self, groups: Sequence[int]) -> bool:
        return self._is_over or self.fills(groups)

    def _add(self, roles: Sequence[Trainer], groups: Sequence[int]) -> None:
        start = time.perf_counter()
        batch, share = self.make_batch(groups)
        for role in roles:
            if role.name not in self._sums:
                self._sums[role.name] = self.begin(role)
            with stage(stage_names.gradients(role.title), role.layout.devices):
                self._sums[role.name].add(batch, share)
        with self._lock:
            self.busy_seconds += time.perf_counter() - start
