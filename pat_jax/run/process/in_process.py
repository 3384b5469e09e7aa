"""A run inside of a program, such as a notebook: restores the process's log and signal handlers.

Knows the process. Does not know what a run does.
"""

import gc
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from pat_jax.common.run_command import in_one_sentence
from pat_jax.run.process.stop_signals import Stopped, StopSignals


@contextmanager
def in_program() -> Iterator[StopSignals]:
    """Inside this context, the run owns the package's log, and signals stop the run; both are
    restored afterwards. Raises KeyboardInterrupt if a signal has stopped the run. A signal other
    than SIGINT is sent once more before, for the program's own handler. Other errors are raised as
    in `in_one_sentence`."""
    stopped: Stopped | None = None
    with in_one_sentence(), _logging_given_back():
        try:
            with StopSignals(owns_process=False) as signals:
                yield signals
        except Stopped as stop:
            stopped = stop
    gc.collect()  # frees arrays of the ended run on devices that the next one needs
    if stopped is None:
        return
    if stopped.name != signal.SIGINT.name:
        signal.raise_signal(signal.Signals[stopped.name])
    raise KeyboardInterrupt(f"stopped by {stopped.name}") from None


@contextmanager
def _logging_given_back() -> Iterator[None]:
    package = logging.getLogger("pat_jax")
    handlers = package.handlers[:]
    level = package.level
    propagate = package.propagate
    raises = logging.raiseExceptions
    try:
        yield
    finally:
        for handler in package.handlers:
            if handler not in handlers:
                handler.close()
        package.handlers[:] = handlers
        package.propagate = propagate
        logging.raiseExceptions = raises
        package.setLevel(level)
