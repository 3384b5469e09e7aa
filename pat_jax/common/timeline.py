"""When each stage of a run computed, and on which devices.

Any code that runs a stage marks it with `stage`, as it would call `logging`. The marks are kept
while `recorded` is entered. The stages' names appear in profiler traces, too.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import jax

from pat_jax.common.devices import Device


@dataclass(frozen=True)
class Span:
    """One stage: what computed, where, and when."""

    name: str  # such as "gradients of the policy"
    devices: frozenset[Device]
    begin_s: float  # since the timeline began
    end_s: float


@dataclass
class Timeline:
    """The stages since the last `take`. Any thread may add one."""

    _spans: list[Span] = field(default_factory=list)
    _begin: float = field(default_factory=time.perf_counter)

    def add(self, name: str, devices: Iterable[Device], begin: float, end: float) -> None:
        """Adds a stage. `begin` and `end` are seconds of `time.perf_counter`."""
        self._spans.append(Span(name, frozenset(devices), begin - self._begin, end - self._begin))

    def take(self) -> list[Span]:
        """Returns the stages since the last call, by their beginning, and restarts at 0 s."""
        taken = self._spans
        self._spans = []
        self._begin = time.perf_counter()
        return sorted(taken, key=lambda span: span.begin_s)


_recording: list[Timeline] = []


@contextmanager
def recorded() -> Iterator[Timeline]:
    """Yields a timeline of the stages of all threads while it is entered."""
    timeline = Timeline()
    _recording.append(timeline)
    try:
        yield timeline
    finally:
        _recording.remove(timeline)


@contextmanager
def stage(name: str, devices: Iterable[Device]) -> Iterator[None]:
    """While entered, marks what is done as a stage of this name on these devices. Wait for the
    results before it ends: JAX still computes them when a call has returned."""
    begin = time.perf_counter()
    with jax.profiler.TraceAnnotation(name):
        yield
    end = time.perf_counter()
    for timeline in _recording:
        timeline.add(name, devices, begin, end)
