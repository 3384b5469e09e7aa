"""A command from its first line to its exit code: one sentence for what a user can put right.

Knows errors, signals and the processes of a run. Does not know options.
"""

import errno
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from pat_jax.common.errors import UserError, shortened
from pat_jax.common.hosts.together import process_group
from pat_jax.common.printable import printable

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
# What a path can be that no reader asks about: a name of more than 255 bytes, a file in the place of a folder,
# a ring of links, a device that is not there.
_NO_PATH = (
    *(errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENOENT, errno.ENXIO),
    *(errno.EACCES, errno.EPERM, errno.ENODEV, errno.EINVAL, errno.EIO, errno.EEXIST),
)


@contextmanager
def in_one_sentence() -> Iterator[None]:
    """A disk without room is a `UserError`, and so is a path that cannot be."""
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
    """Run a command; a `UserError` becomes `error: …` on stderr and exit code 2.

    It ends without a message when the reader of its output has gone (`| head`) and on Ctrl-C, as
    other programs do. A disk without room is one sentence as well.
    """
    try:
        _run_command(main)
    except SystemExit as end:
        _end_at_once(end.code)
        raise
    _end_at_once(0)


def _end_at_once(code: str | int | None) -> None:
    """Where threads of Orbax would keep the process: after a checkpoint that failed they wait for its
    folder, for ten minutes, and nobody can tell them."""
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
            sentence = printable(str(error))  # which quotes files, rewards and answers
            process_group().fail(sentence, 2)
            print(f"error: {sentence}", file=sys.stderr)
            raise SystemExit(2) from None
        except KeyboardInterrupt:
            process_group().fail("it was interrupted", 128 + signal.SIGINT)
            raise SystemExit(128 + signal.SIGINT) from None
        except Exception as error:
            if not process_group().is_alone:  # its end would wait for the others
                if not process_group().is_ending:
                    traceback.print_exc(file=sys.__stderr__)
                process_group().fail(f"{type(error).__name__}: {error}", 1)
            raise
        finally:
            sys.stdout.flush()  # the interpreter would complain if this failed at its end
    except BrokenPipeError:
        gone = [stream for stream in (sys.stdout, sys.stderr) if _has_no_reader(stream)]
        if not gone:
            raise  # another pipe broke
        for stream in gone:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None


def _has_no_reader(stream: TextIO) -> bool:
    """Whether it is a pipe whose other end is closed."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
