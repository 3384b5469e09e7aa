"""Puts the stages of an iteration in order: on which devices each runs, and when.

Each device runs one program at a time. Parts run in the order in which they become ready, whole
stages in the order in which a run launches them. A program takes all its devices at once and waits
until the last of them is free.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pat_jax.planning.stage_names import ROLLOUT
from pat_jax.profiling.placement.iteration import Iteration, Schedule, Span, Stage

WHOLE = -1  # in place of a part: the stage runs in one piece


@dataclass
class _Task:
    """A piece of a stage."""

    stage: Stage
    part: int  # or WHOLE
    seconds: float
    waits_for: int = 0  # tasks that have to end first
    ready_s: float = 0.0
    begin_s: float = 0.0
    cause: "_Task | None" = None  # that ended last before it could begin; None: the rollout
    then: list["_Task"] = field(default_factory=list)

    @property
    def end_s(self) -> float:
        return self.begin_s + self.seconds


def scheduled(iteration: Iteration) -> Schedule:
    """Returns when each stage runs."""
    tasks = _tasks(iteration)
    order = {stage.name: i for i, stage in enumerate(iteration.stages)}
    heap = [(t.ready_s, order[t.stage.name], t.part, t) for t in tasks if not t.waits_for]
    heapq.heapify(heap)
    last: dict[int, _Task | None] = dict.fromkeys(iteration.devices)  # on each device
    free = dict.fromkeys(iteration.devices, iteration.rollout_s)
    while heap:
        *_, task = heapq.heappop(heap)
        held = max(task.stage.devices, key=lambda device: free.get(device, 0.0))
        task.begin_s = max(task.ready_s, free.get(held, 0.0))
        if free.get(held, 0.0) > task.ready_s:
            task.cause = last[held]
        for device in task.stage.devices:
            free[device], last[device] = task.end_s, task
        for other in task.then:
            other.waits_for -= 1
            if task.end_s >= other.ready_s:
                other.ready_s, other.cause = task.end_s, task
            if not other.waits_for:
                heapq.heappush(heap, (other.ready_s, order[other.stage.name], other.part, other))
    return _schedule(iteration, tasks)


def _tasks(iteration: Iteration) -> list[_Task]:
    """The tasks of all stages, each told what comes after it."""
    found: dict[str, list[_Task]] = {}
    for stage in iteration.stages:
        tasks = list(_pieces(stage, iteration))
        for task in tasks:
            for before in _waited_for(task, found):
                before.then.append(task)
                task.waits_for += 1
        found[stage.name] = tasks
    return [task for tasks in found.values() for task in tasks]


def _waited_for(task: _Task, earlier: Mapping[str, Sequence[_Task]]) -> Iterator[_Task]:
    """Yields the tasks of earlier stages that end before a whole stage: those that it needs, and
    whole ones launched before it on one of its devices. A part waits for no stage."""
    if task.part != WHOLE:
        return
    for name, tasks in earlier.items():
        for before in tasks:
            is_shared = {*task.stage.devices} & {*before.stage.devices}
            if name in task.stage.needs or (before.part == WHOLE and is_shared):
                yield before


def _pieces(stage: Stage, iteration: Iteration) -> Iterator[_Task]:
    if not stage.ready_s:
        yield _Task(stage, WHOLE, stage.total_s, ready_s=iteration.rollout_s)
        return
    for i, (seconds, ready_s) in enumerate(zip(stage.seconds, stage.ready_s, strict=True)):
        yield _Task(stage, i, seconds, ready_s=ready_s)


def _schedule(iteration: Iteration, tasks: list[_Task]) -> Schedule:
    rollout = Span(ROLLOUT, iteration.devices, 0.0, iteration.rollout_s, iteration.rollout_s)
    spans = [rollout]
    for stage in iteration.stages:
        own = [task for task in tasks if task.stage is stage]
        begin, end = min(task.begin_s for task in own), max(task.end_s for task in own)
        spans.append(Span(stage.name, stage.devices, begin, end, stage.total_s))
    final = max(tasks, key=lambda task: task.end_s, default=None)
    path: dict[str, float] = {}
    while final:
        path[final.stage.name] = path.get(final.stage.name, 0.0) + final.seconds
        if final.cause is None:
            path[ROLLOUT] = final.begin_s
        final = final.cause
    seconds = max(span.end_s for span in spans)
    return Schedule(seconds, tuple(spans), path or {ROLLOUT: seconds}, iteration.beside)
