"""What the process of a reward and its caller tell each other, over a pair of sockets.

    caller → process    8 bytes, how long; then number and responses of a call, pickled process →
    caller    {"call": number, "seconds": …, "scores": [number or failure, …], …}, a line of JSON

Code of the user runs in the process, and may write to every open file, fork, or close what it
finds. So nothing that comes from there is unpickled, and an answer has a bound in time and in
length and names its call; anything else ends the process. Columns hold dates, bytes and decimals,
for which JSON has no words; to the process they go as pickles, which nobody but the caller can
write. Does not know how processes start (`workers.py`) or what a function does; imports no jax.
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

LARGEST_ANSWER = 2**26  # bytes; a response that raises has about four thousand of them
LOST = 90  # exit code of a process whose socket the function has closed, or put another file in its place
IMPORT = 0  # the number of the first answer, which nobody asks for: whether the function is there
_LENGTH_BYTES = 8
_CHUNK = 2**16
_LONGEST_POLL = 3600.0  # seconds: poll() takes milliseconds, of which 2**31 are too many
# What `_read` raises of text that is not an answer; of broken JSON the first.
_MALFORMED = (ValueError, TypeError, KeyError, OverflowError, AttributeError)


class NoAnswerError(Exception):
    """What came is not the answer to the call: the function has written to the socket."""


class Calls:
    """The caller's end. `until` is a moment of `time.monotonic()`, also one that never comes.

    Every method raises TimeoutError when that is over, and EOFError when the process is gone.
    """

    def __init__(self, ours: socket.socket):
        self._socket = ours
        ours.setblocking(False)

    def close(self) -> None:
        self._socket.close()

    def ask(self, number: int, responses: Sequence[Response], until: float) -> None:
        """Sends a call, though the process may not read it."""
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
        """That to the call of this number.

        Args:
          count: of its responses.

        Raises:
          NoAnswerError: something else has come.
        """
        line = self._line(until)
        try:
            return _read(line.decode(), number, count)
        except _MALFORMED as error:
            raise NoAnswerError from error

    def _line(self, until: float) -> bytes:
        """What comes up to a line break, and whatever has come behind it."""
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
    """Seconds left; raises TimeoutError where there are none."""
    if (left := until - time.monotonic()) <= 0:
        raise TimeoutError
    return left


class Answers:
    """The process's end, of it alone: its children have it neither after a fork nor after an exec.

    Args:
      file: the number of the open file.
    """

    def __init__(self, file: int):
        os.set_inheritable(file, False)
        self._file, self._process, self._identity = file, os.getpid(), _identity(file)
        os.register_at_fork(after_in_child=self._forget)

    def receive(self) -> tuple[int, list[Response]]:
        """Number and responses of the next call; raises EOFError where there will be none."""
        length = int.from_bytes(self._read(_LENGTH_BYTES))
        return pickle.loads(self._read(length))

    def send(self, number: int, outcome: Outcome) -> None:
        """Ends the process where it cannot be sent, and a child of it that has come here."""
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
        """Raises OSError where the number is no longer that of our socket."""
        if _identity(self._file) != self._identity:
            raise OSError

    def _forget(self) -> None:
        """In a child: the caller is to see when the process itself has ended."""
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
    # What is not finite is a failure by now.
    return f"{json.dumps(answer, allow_nan=False)}\n".encode()


def _told(score: float | Failure | None) -> object:
    if isinstance(score, Failure):
        return {"cause": score.cause, "text": score.text, "traceback": score.traceback}
    return score


def _read(text: str, number: int, count: int) -> Outcome:
    """Raises one of `_MALFORMED` where it is not an answer to this call."""
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
    if abs(value) > LARGEST:  # of which the process would have made a failure
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
