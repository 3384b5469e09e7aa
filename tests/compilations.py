"""Counts what XLA compiles."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax.monitoring

COMPILED = "/jax/core/compile/backend_compile_duration"


@contextmanager
def counted_compilations() -> Iterator[list[str]]:
    """The events of compilation, those answered by the persistent cache included."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILED:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
