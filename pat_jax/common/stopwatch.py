"""Seconds by stage, under one set of names for logs, metrics and profiler traces."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax


class Stopwatch:
    """Adds up the seconds of each stage since the last reset."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begin = time.perf_counter()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        with jax.profiler.TraceAnnotation(stage):
            yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._begin

    def metrics(self, prefix: str) -> dict[str, float]:
        return {f"{prefix}{stage}": seconds for stage, seconds in self.seconds.items()}

    def reset(self) -> None:
        self.seconds.clear()
        self._begin = time.perf_counter()
