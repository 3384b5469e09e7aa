"""Measures seconds by stage, with the same names in logs, metrics and profiler traces."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax


class Stopwatch:
    """Adds up the seconds of each stage since the last reset."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """`now` returns seconds since any fixed time."""
        self.seconds: dict[str, float] = {}
        self._now = now
        self._begin = now()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = self._now()
        with jax.profiler.TraceAnnotation(stage):
            yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + self._now() - start

    @property
    def elapsed(self) -> float:
        return self._now() - self._begin

    def take(self) -> dict[str, float]:
        """Returns the seconds of each stage, and begins new sums. `elapsed` goes on."""
        taken = self.seconds
        self.seconds = {}
        return taken

    @property
    def metrics(self) -> dict[str, float]:
        return {f"timing/{stage}": seconds for stage, seconds in self.seconds.items()}

    def reset(self) -> None:
        self.seconds.clear()
        self._begin = self._now()
