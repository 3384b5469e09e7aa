"""Sends calls to a process that runs a user's code, and answers back, over a pair of sockets.

    caller → process    number and content of a call, pickled
    process → caller    a line of JSON: {"call": number, …}

The user's code runs in the process, and may write to any open file, fork, or close files. So the
caller unpickles nothing. An answer names its call and is bounded in time and length; if anything
else arrives, the process is ended. Columns go to the process as pickles, because JSON has no dates,
bytes and decimals; only the caller can write these. Does not know what is called, nor how processes
start (`workers.py`); imports no jax.
"""

import contextlib
import json
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from pat_jax.common.json_text import parse_json

T = TypeVar("T")

LARGEST_ANSWER = 2**26  # bytes; a response that raises takes about four thousand
LOST = 90  # exit code of a process whose socket the function has closed or replaced
IMPORT = 0  # number of the first answer, sent without a call: whether the import succeeded
_CHUNK = 2**16
_LONGEST_WAIT = 2e6  # seconds: a socket's timeout must be below 2**31 milliseconds
# The exceptions from reading a text that is not an answer; ValueError for broken JSON.
_MALFORMED = (ValueError, TypeError, KeyError, OverflowError, AttributeError)


class NoAnswerError(Exception):
    """The bytes that arrived are not the answer to the call: the user's code has written to the
    socket."""


class Calls:
    """The caller's end of the sockets. `until` is a deadline by `time.monotonic()`, or infinity.

    Every method raises TimeoutError after `until`, and EOFError when the process has ended.
    """

    def __init__(self, ours: socket.socket):
        self._socket = ours

    def close(self) -> None:
        self._socket.close()

    def ask(self, number: int, content: object, until: float) -> None:
        """Sends a call. Waits until `until` at most for the process to read it."""
        with self._waiting(until):
            self._socket.sendall(pickle.dumps((number, content)))

    def answer(self, number: int, read: Callable[[Any], T], until: float) -> T:
        """Returns the result of `read` for the answer to the call of this number. Raises
        NoAnswerError if something else has arrived."""
        line = bytearray()
        chunk = b""
        while b"\n" not in chunk:  # bytes after the line end make it malformed
            if len(line) > LARGEST_ANSWER:
                raise NoAnswerError
            with self._waiting(until):
                chunk = self._socket.recv(_CHUNK)
            if not chunk:
                raise EOFError
            line += chunk
        try:
            answer: Any = parse_json(line.decode())
            if answer["call"] != number:
                raise NoAnswerError
            return read(answer)
        except _MALFORMED as error:
            raise NoAnswerError from error

    @contextlib.contextmanager
    def _waiting(self, until: float) -> Iterator[None]:
        """Limits the time of one operation of the socket."""
        if (left := until - time.monotonic()) <= 0:  # bytes may arrive without end
            raise TimeoutError
        self._socket.settimeout(min(left, _LONGEST_WAIT))
        try:
            yield
        except TimeoutError:
            raise
        except OSError as error:
            raise EOFError from error


class Answers:
    """The process's end of the sockets. A child process loses it, after a fork or an exec."""

    def __init__(self, theirs: socket.socket):
        theirs.set_inheritable(False)
        self._socket = theirs
        self._calls = theirs.makefile("rb")
        self._process = os.getpid()
        os.register_at_fork(after_in_child=self._forget)

    def receive(self) -> tuple[int, Any]:
        """Returns number and content of the next call; raises EOFError if there are no more."""
        try:
            return pickle.load(self._calls)
        except OSError:
            os._exit(LOST)

    def send(self, number: int, answer: Mapping[str, object]) -> int:
        """Sends an answer. Ends the process if that fails, or if this is a forked child. Returns 0
        or, if the answer is too long and not sent, its number of bytes."""
        if os.getpid() != self._process:
            os._exit(0)
        line = f"{json.dumps({'call': number, **answer}, allow_nan=False)}\n".encode()
        if len(line) > LARGEST_ANSWER:
            return len(line)
        try:
            self._socket.sendall(line)
        except OSError:
            os._exit(LOST)
        return 0

    def _forget(self) -> None:
        """Closes a forked child's copy of the socket, which would hide this process's end from the
        caller."""
        with contextlib.suppress(OSError):
            os.close(self._socket.detach())
