"""A run inside of a program, such as a notebook: what it takes of the process it gives back.

Knows the process. Does not know what a run does.
"""

import gc
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from pat_jax.run.process.stop_signals import Stopped, StopSignals


@contextmanager
def in_program() -> Iterator[StopSignals]:
    """While entered, the package's log is the run's and signals stop it; afterwards they are what
    they were. Raises KeyboardInterrupt where SIGINT has stopped the run, which has kept what there
    was to keep. After SIGTERM the program gets the signal once more, as it takes it by itself."""
    stopped: Stopped | None = None
    with _logging_given_back():
        try:
            with StopSignals(owns_process=False) as signals:
                yield signals
        except Stopped as stop:
            stopped = stop
    gc.collect()  # arrays of a run that has ended, on the devices that the next one needs
    if stopped is None:
        return
    if stopped.name == signal.SIGINT.name:
        raise KeyboardInterrupt("the run has been stopped, and is saved") from None
    signal.raise_signal(signal.Signals[stopped.name])


@contextmanager
def _logging_given_back() -> Iterator[None]:
    package = logging.getLogger("pat_jax")
    handlers, level, propagate = package.handlers[:], package.level, package.propagate
    raises = logging.raiseExceptions
    try:
        yield
    finally:
        for handler in package.handlers:
            if handler not in handlers:
                handler.close()
        package.handlers[:], package.propagate = handlers, propagate
        logging.raiseExceptions = raises
        package.setLevel(level)
