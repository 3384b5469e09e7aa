"""The protocol between a reward's process and its caller, over a pair of sockets.

    caller → process    length, 8 bytes; then number and responses of a call, pickled
    process → caller    a line of JSON: {"call": number, "scores": [number or failure, …], …}

The user's code runs in the process, and may write to any open file, fork, or close files. So
nothing from there is unpickled, and an answer is bounded in time and length and names its call;
anything else ends the process. To the process, columns go as pickles, because JSON has no dates,
bytes and decimals; only the caller can write these. Does not know how processes start
(`workers.py`) or what a function does; imports no jax.
"""

import contextlib
import json
import os
import pickle
import select
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from pat_jax.common.json_text import parse_json
from pat_jax.rl.rewards.outcome import Cause, Failure, Outcome
from pat_jax.rl.rewards.responses import Response
from pat_jax.rl.rewards.results import LARGEST

LARGEST_ANSWER = 2**26  # bytes; a response that raises takes about four thousand
LOST = 90  # exit code of a process whose socket the function has closed or replaced
IMPORT = 0  # number of the first answer, sent without a call: whether the import succeeded
_LENGTH_BYTES = 8
_CHUNK = 2**16
_LONGEST_POLL = 3600.0  # seconds: poll() takes milliseconds, of which 2**31 are too many
# What `_read` raises for text that is not an answer; ValueError for broken JSON.
_MALFORMED = (ValueError, TypeError, KeyError, OverflowError, AttributeError)


class NoAnswerError(Exception):
    """The bytes that arrived are not the answer to the call: the user's function has written to the
    socket."""


class Calls:
    """The caller's end of the sockets. `until` is a time of `time.monotonic()`, or infinity.

    Every method raises TimeoutError after `until`, and EOFError when the process has ended.
    """

    def __init__(self, ours: socket.socket):
        self._socket = ours
        ours.setblocking(False)

    def close(self) -> None:
        self._socket.close()

    def ask(self, number: int, responses: Sequence[Response], until: float) -> None:
        """Sends a call; waits no longer than `until` for the process to read it."""
        content = pickle.dumps((number, list(responses)))
        rest = memoryview(len(content).to_bytes(_LENGTH_BYTES) + content)
        while rest:
            self._wait(select.POLLOUT, until)
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise EOFError from error
            _check_time(until)

    def answer(self, number: int, count: int, until: float) -> Outcome:
        """Returns the answer to the call of this number, which has `count` responses. Raises
        NoAnswerError if something else has arrived."""
        line = self._line(until)
        try:
            return _read(line.decode(), number, count)
        except _MALFORMED as error:
            raise NoAnswerError from error

    def _line(self, until: float) -> bytes:
        """Reads up to a line break, with whatever has arrived behind it."""
        line = bytearray()
        while True:
            self._wait(select.POLLIN, until)
            try:
                chunk = self._socket.recv(_CHUNK)
            except BlockingIOError:
                continue
            except OSError as error:
                raise EOFError from error
            if not chunk:
                raise EOFError
            line += chunk
            if b"\n" in chunk:
                return bytes(line)
            if len(line) > LARGEST_ANSWER:
                raise NoAnswerError
            _check_time(until)  # something may come again and again

    def _wait(self, event: int, until: float) -> None:
        poll = select.poll()
        poll.register(self._socket, event)
        left = until - time.monotonic()
        while not poll.poll(1e3 * min(max(left, 0.0), _LONGEST_POLL)):
            left = _check_time(until)


def _check_time(until: float) -> float:
    """Returns the seconds left; raises TimeoutError if there are none."""
    if (left := until - time.monotonic()) <= 0:
        raise TimeoutError
    return left


class Answers:
    """The process's end of the sockets. Its children lose it, after a fork or an exec.

    Args:
      file: the socket's file descriptor.
    """

    def __init__(self, file: int):
        os.set_inheritable(file, False)
        self._file, self._process, self._identity = file, os.getpid(), _identity(file)
        os.register_at_fork(after_in_child=self._forget)

    def receive(self) -> tuple[int, list[Response]]:
        """Returns number and responses of the next call; raises EOFError if there are no more."""
        length = int.from_bytes(self._read(_LENGTH_BYTES))
        return pickle.loads(self._read(length))

    def send(self, number: int, outcome: Outcome) -> None:
        """Sends an answer. Ends the process if that fails, or if this is a forked child."""
        if os.getpid() != self._process:
            os._exit(0)
        line = _written(number, outcome)
        if len(line) > LARGEST_ANSWER:
            failure = Failure(Cause.WRONG_RESULT, f"returned {len(line):,} bytes of measurements")
            line = _written(number, Outcome(failure=failure, seconds=outcome.seconds))
        rest = memoryview(line)
        try:
            while rest:
                self._check()
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            os._exit(LOST)

    def _read(self, length: int) -> bytes:
        read = bytearray()
        try:
            while len(read) < length:
                self._check()
                chunk = os.read(self._file, min(_CHUNK, length - len(read)))
                if not chunk:
                    raise EOFError
                read += chunk
        except OSError:
            os._exit(LOST)
        return bytes(read)

    def _check(self) -> None:
        """Raises OSError if the file descriptor is no longer our socket's."""
        if _identity(self._file) != self._identity:
            raise OSError

    def _forget(self) -> None:
        """Closes a forked child's copy of the socket: with it open, the caller would not see this process end."""
        with contextlib.suppress(OSError):
            self._check()
            os.close(self._file)


def _identity(file: int) -> tuple[int, int]:
    found = os.fstat(file)
    return found.st_dev, found.st_ino


def _written(number: int, outcome: Outcome) -> bytes:
    answer = {
        "call": number,
        "seconds": outcome.seconds,
        "mistake": outcome.mistake,
        "failure": _told(outcome.failure),
        "scores": [_told(score) for score in outcome.scores],
        "numbers": [dict(one) for one in outcome.numbers],
    }
    # Scores that are not finite have become failures before.
    return f"{json.dumps(answer, allow_nan=False)}\n".encode()


def _told(score: float | Failure | None) -> object:
    if isinstance(score, Failure):
        return {"cause": score.cause, "text": score.text, "traceback": score.traceback}
    return score


def _read(text: str, number: int, count: int) -> Outcome:
    """Parses an answer; raises one of `_MALFORMED` if it is not an answer to this call."""
    answer: Any = parse_json(text)
    outcome = Outcome(
        scores=[_score(score) for score in answer["scores"]],
        failure=None if answer["failure"] is None else _failure(answer["failure"]),
        numbers=[{key: _number(x) for key, x in one.items()} for one in answer["numbers"]],
        mistake=_text(answer["mistake"]),
        seconds=_number(answer["seconds"]),
    )
    has_scores = not (outcome.failure or outcome.mistake)
    wanted = count if has_scores else 0
    if answer["call"] != number or len(outcome.scores) != wanted:
        raise ValueError
    if len(outcome.numbers) not in (0, wanted):
        raise ValueError
    return outcome


def _score(value: object) -> float | Failure:
    if not isinstance(value, int | float):
        return _failure(value)
    if abs(value) > LARGEST:  # the process would have sent a failure
        raise ValueError
    return _number(value)


def _failure(value: Any) -> Failure:
    return Failure(Cause(value["cause"]), _text(value["text"]), _text(value["traceback"]))


def _number(value: Any) -> float:
    number = float(value)
    if not abs(number) <= sys.float_info.max:
        raise ValueError
    return number


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value
