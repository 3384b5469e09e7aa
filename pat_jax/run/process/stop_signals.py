"""SIGTERM, Ctrl-C and a closed terminal: stops a run so that it can save first.

Knows signals and when they may interrupt. Does not know what is worth keeping (`loop.py`).
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn, Self

from pat_jax.common.hosts.together import ProcessGroup, process_group


class Stopped(BaseException):
    """Raised in the main thread when a signal asks the run to end."""

    def __init__(self, number: int):
        self.name = signal.Signals(number).name
        self.exit_code = 128 + number
        super().__init__(self.name)


class StoppedAtOnce(KeyboardInterrupt):
    """Raised at the second SIGINT inside a program: nothing more is saved or printed."""


class StopSignals:
    """Inside this context, SIGTERM, SIGINT and SIGHUP raise `Stopped`; a second SIGTERM or SIGINT
    ends the process at once. A closing terminal sends SIGHUP several times, so repeats of it do
    nothing; if it is ignored, as under nohup, it stays ignored.

    Args:
      owns_process: False for a run inside of a program, such as a notebook. The second SIGINT then
        ends the run and not the process. Outside of the main thread, which alone gets Python's
        signals, no handlers are set.
    """

    def __init__(self, *, owns_process: bool = True) -> None:
        self._received: int | None = None
        self._num_asked = 0  # SIGTERM and SIGINT received
        self._is_held = False
        self._owns_process = owns_process
        self._us = process_group()
        # Tells what is saved and how to go on, for a user who does not wait.
        self.last_words: Callable[[], str] = lambda: "nothing is saved yet"

    def __enter__(self) -> Self:
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        if not self._owns_process and threading.current_thread() is not threading.main_thread():
            numbers = []
        self._terminals = [file for file in range(3) if os.isatty(file)]
        self._before = {number: signal.signal(number, self._receive) for number in numbers}
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if not self._owns_process and self._received == signal.SIGTERM and kind is not Stopped:
            signal.raise_signal(self._received)  # the run has ended before it could be stopped

    @contextmanager
    def held(self) -> Iterator[None]:
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._received is not None and self._us.is_alone:
            raise Stopped(self._received)

    def hold(self) -> None:
        """Holds back `Stopped` for good: the run is ending by itself."""
        self._is_held = True

    def stop_all(self, us: ProcessGroup) -> None:
        """From now on, a signal to one process stops all processes, when they next agree on
        something outside of `held`."""

        def stop(number: int) -> NoReturn:
            raise Stopped(number)

        self._us = us
        us.stop = stop
        us.may_stop = lambda: not self._is_held

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGHUP:
            _silence(self._terminals)
        else:
            self._num_asked += 1
        if self._num_asked > 1:
            _tell(f"\nended at once: {self.last_words()}\n")
            if number == signal.SIGINT and not self._owns_process:
                raise StoppedAtOnce
            os._exit(128 + number)
        if self._received is not None:  # already stopping
            return
        self._received = number
        _tell(f"\n{signal.Signals(number).name}: stopping; once more ends it at once\n")
        if not self._us.is_alone:
            self._us.ask_to_stop(number)
        elif not self._is_held:
            raise Stopped(number)


def _tell(text: str) -> None:
    """Writes to stderr without print, which the signal may have interrupted."""
    with suppress(OSError):
        os.write(2, text.encode(errors="replace"))


def _silence(terminals: list[int]) -> None:
    """Redirects files whose terminal has gone to /dev/null: a write to them would fail."""
    for file in terminals:
        if not os.isatty(file):
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, file)
            os.close(nowhere)


def leave(exit_code: int) -> NoReturn:
    """Takes leave of the run's other processes, and ends this one without waiting for threads."""
    process_group().leave()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # such as a pipe whose reader has gone
            stream.flush()
    os._exit(exit_code)
