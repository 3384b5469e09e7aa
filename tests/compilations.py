"""Counts what XLA compiles, and says on which thread."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import jax.monitoring

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
