"""Runs a command: prints a mistake of the user in one sentence, and sets the exit code.

Knows errors, signals and the processes of a run. Does not know options.
"""

import errno
import inspect
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from types import ModuleType
from typing import Any, TextIO

from pat_jax.common.errors import UserError, printable, shortened
from pat_jax.common.hosts.together import process_group

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
# Errors of impossible paths: a name of more than 255 bytes, a file where a folder should be, a ring
# of links, a device that is not there.
_NO_PATH = (
    *(errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENOENT, errno.ENXIO),
    *(errno.EACCES, errno.EPERM, errno.ENODEV, errno.EINVAL, errno.EIO, errno.EEXIST),
)


@contextmanager
def in_one_sentence() -> Iterator[None]:
    """While entered, turns the OSError of a full disk or an impossible path into a UserError."""
    try:
        yield
    except OSError as error:
        path = shortened(str(error.filename)) if error.filename else ""
        if error.errno in _NO_ROOM:
            where = f" for {path}" if path else ""
            raise UserError(f"{error.strerror}{where}: make room and start again.") from None
        if error.errno in _NO_PATH and path:
            raise UserError(
                f"{path} cannot be used ({error.strerror}): expected a path that can; check the options that "
                "name files and folders."
            ) from None
        raise


def run_command(main: Callable[[], None]) -> None:
    """Runs a command; a `UserError` becomes `error: …` on stderr and exit code 2.

    The command ends without a message on Ctrl-C, and when the reader of its output has gone
    (`| head`). A full disk is reported in one sentence, too.
    """
    _write_whole_lines()
    try:
        _run_command(main)
    except SystemExit as end:
        _end_at_once(end.code)
        raise
    _end_at_once(0)


def _write_whole_lines() -> None:
    """Makes Python write a line and its end at once, so that lines of two threads hardly ever mix.
    With PYTHONUNBUFFERED, which many container images set, it writes line and end separately."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.write_through:
            stream.reconfigure(line_buffering=True, write_through=False)


def _end_at_once(code: str | int | None) -> None:
    """Exits at once if threads of Orbax still run: after a failed checkpoint they wait ten minutes
    for its folder, and cannot be stopped."""
    threads = [one for one in threading.enumerate() if not one.daemon]
    if any(type(one).__module__.startswith("orbax.") for one in threads):
        with suppress(OSError):
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _run_command(main: Callable[[], None]) -> None:
    try:
        try:
            with in_one_sentence():
                main()
            process_group().leave()
        except UserError as error:
            sentence = printable(str(error))  # it may quote files, rewards and answers
            process_group().fail(sentence, 2)
            print(f"error: {sentence}", file=sys.stderr)
            raise SystemExit(2) from None
        except KeyboardInterrupt:
            process_group().fail("it was interrupted", 128 + signal.SIGINT)
            raise SystemExit(128 + signal.SIGINT) from None
        except Exception as error:
            if not process_group().is_alone:  # a normal exit would wait for the others
                if not process_group().is_ending:
                    traceback.print_exc(file=sys.__stderr__)
                process_group().fail(f"{type(error).__name__}: {error}", 1)
            raise
        finally:
            sys.stdout.flush()  # a failure here is caught; at exit the interpreter would print it
    except BrokenPipeError:
        gone = [stream for stream in (sys.stdout, sys.stderr) if _has_no_reader(stream)]
        if not gone:
            raise  # some other pipe is broken
        for stream in gone:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None


def _has_no_reader(stream: TextIO) -> bool:
    """Returns whether the stream is a pipe whose other end is closed."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def offer(function: Callable[..., Any], main: Callable[[], None]) -> None:
    """Makes calls of the module that defines `function` call it, and `python -m MODULE`
    run `main`. The module then shows the function's signature and documentation."""
    module = sys.modules[function.__module__]
    members = {"__call__": staticmethod(function), "__signature__": inspect.signature(function)}
    module.__class__ = type("CallableModule", (ModuleType,), members)
    module.__doc__ = function.__doc__
    if function.__module__ == "__main__":
        run_command(main)
