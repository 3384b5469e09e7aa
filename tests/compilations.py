"""Counts what XLA compiles, and says on which thread."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax.monitoring
import pytest

from pat_jax.run import loop
from pat_jax.run.checkpoints.checkpoint import Checkpointer
from pat_jax.run.opened import Run

COMPILED = "/jax/core/compile/backend_compile_duration"


@contextmanager
def counted_compilations() -> Iterator[list[str]]:
    """The thread of each compilation, those answered by the persistent cache included."""
    threads: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILED:
            threads.append(threading.current_thread().name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield threads
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@contextmanager
def counted_in_iterations() -> Iterator[list[str]]:
    """The same of the iterations and evaluations of runs, without their checkpoints.

    At the first of these, orbax compiles slices of what every device holds (some 10 ms each).
    """
    found: list[str] = []
    learn, save = loop.learn, Checkpointer.save
    with counted_compilations() as threads, pytest.MonkeyPatch.context() as patch:

        def counted(run: Run) -> Any:
            before = len(threads)
            last = learn(run)
            found.extend(threads[before:])
            return last

        def uncounted(self: Checkpointer, *args: Any) -> None:
            before = len(threads)
            save(self, *args)
            del threads[before:]

        patch.setattr(loop, "learn", counted)
        patch.setattr(Checkpointer, "save", uncounted)
        yield found
