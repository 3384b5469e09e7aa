"""SIGTERM and Ctrl-C: what a run does between being told to stop and being gone.

Knows signals and when they may interrupt. Does not know what is worth keeping (`loop.py`).
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn, Self


class Stopped(BaseException):
    """A signal asks the run to end; raised in the main thread, between two of its statements."""

    def __init__(self, number: int):
        self.name, self.exit_code = signal.Signals(number).name, 128 + number
        super().__init__(self.name)


class StopSignals:
    """While entered, SIGTERM and SIGINT raise `Stopped`; the second of them ends the process at once.

    What must not be torn apart is done inside `held`: there a signal waits for its end.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._is_held = False

    def __enter__(self) -> Self:
        numbers = (signal.SIGTERM, signal.SIGINT)
        self._before = {number: signal.signal(number, self._receive) for number in numbers}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._received is not None:
            raise Stopped(self._received)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._received is not None:
            os._exit(128 + number)
        self._received = number
        name = signal.Signals(number).name
        # Not by print: it may be in the middle of a line of its own.
        os.write(2, f"\n{name}: stopping; once more ends it at once\n".encode())
        if not self._is_held:
            raise Stopped(number)


def leave(exit_code: int) -> NoReturn:
    """Ends the process without waiting for threads, such as one that compiles for later."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # such as a pipe whose reader has gone
            stream.flush()
    os._exit(exit_code)
