"""SIGTERM and Ctrl-C: what a run does between being told to stop and being gone.

Knows signals and when they may interrupt. Does not know what is worth keeping (`loop.py`).
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn, Self

from pat_jax.common.hosts.together import Company, company


class Stopped(BaseException):
    """A signal asks the run to end; raised in the main thread, between two of its statements."""

    def __init__(self, number: int):
        self.name, self.exit_code = signal.Signals(number).name, 128 + number
        super().__init__(self.name)


class StopSignals:
    """While entered, SIGTERM and SIGINT raise `Stopped`; the second of them ends the process at once.

    What must not be torn apart is done inside `held`: there a signal waits for its end.

    Args:
      owns_process: False: in a program that goes on after the run, such as a notebook, the second SIGINT
        ends the run at once and not the process. Outside of the main thread, where Python gives signals to
        nobody, none is taken.
    """

    def __init__(self, *, owns_process: bool = True) -> None:
        self._received: int | None = None
        self._is_held = False
        self._owns_process = owns_process
        self._us = company()

    def __enter__(self) -> Self:
        numbers = (signal.SIGTERM, signal.SIGINT)
        if not self._owns_process and threading.current_thread() is not threading.main_thread():
            numbers = ()
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
        if self._received is not None and self._us.is_alone:
            raise Stopped(self._received)

    def stop_all(self, us: Company) -> None:
        """From now on a signal to one of several processes stops all, where they next agree and no step
        is torn apart."""

        def stop(number: int) -> NoReturn:
            raise Stopped(number)

        self._us, us.stop, us.may_stop = us, stop, lambda: not self._is_held

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._received is not None:
            if number == signal.SIGINT and not self._owns_process:
                raise KeyboardInterrupt
            os._exit(128 + number)
        self._received = number
        name = signal.Signals(number).name
        # Not by print: it may be in the middle of a line of its own.
        os.write(2, f"\n{name}: stopping; once more ends it at once\n".encode())
        if not self._us.is_alone:
            self._us.ask_to_stop(number)
        elif not self._is_held:
            raise Stopped(number)


def leave(exit_code: int) -> NoReturn:
    """Ends the process without waiting for threads, such as one that compiles for later, but for the
    other processes of the run."""
    company().leave()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # such as a pipe whose reader has gone
            stream.flush()
    os._exit(exit_code)
