"""Checks that all processes of a run are there, before JAX does. If one is missing, JAX aborts the
process in C++, without a message for the user.

The first process listens at the coordinator's address until every other one has sent its index. It
tells them to go on, or why not, and leaves the port to JAX. Both sides prove that they have the
token of the job (`place.job_token`), without sending it; a visitor with another one is ignored. The
connections stay open until all have met (`watched`): if a process ended meanwhile, JAX would abort
the others, too. Only JSON is read.
"""

import errno
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

from pat_jax.common.errors import UserError
from pat_jax.common.hosts.place import TOKEN, Place
from pat_jax.common.hosts.sockets import (
    BROKEN,
    answer,
    ask,
    is_everywhere,
    open_port,
    receive_fields,
    send_fields,
    split,
    visitors,
)
from pat_jax.common.hosts.together import FAILED, FAILURE_MESSAGE_S
from pat_jax.common.hosts.waiting import START_AGAIN

_HELLO = "pat_jax roll call 2"
_LONGEST_S = 10**6  # that a connection is watched
_MOMENT_S = 1.0
_AGAIN_S = 0.25  # between two tries to reach the first process
_GRACE_S = 15.0  # for the first process's answer, after its own time is over
_NAMED = 8  # processes named in a sentence

Visitor = tuple[socket.socket, Mapping[str, Any]]  # a connection, and the fields it has sent
Lines = dict[int, socket.socket]  # connections to other processes, by their indices


def roll_call(place: Place, wait_s: float, token: bytes = b"") -> tuple[str | None, Lines]:
    """Waits until every process is there. Returns the connections, for `watched`; in the first
    process, also the one address that it listened at, or None if it was all interfaces. Raises
    UserError if a process did not come within `wait_s`, or was started with another number of
    processes."""
    assert place.coordinator is not None
    made_of = place, place.coordinator, time.monotonic() + wait_s, wait_s, token
    return _call(*made_of) if place.index == 0 else (None, {0: _answer(*made_of)})


@contextmanager
def watched(lines: Lines, end: Callable[[int], None]) -> Iterator[None]:
    """While entered, ends this process if another one has ended, with a sentence: `end` is called
    with the exit code, on a thread."""
    is_over, ends = threading.Event(), threading.Lock()

    def watch(index: int, line: socket.socket) -> None:
        try:
            sentence = receive_fields(line, time.monotonic() + _LONGEST_S).get("sentence")
        except BROKEN:
            sentence = f"process {index} has ended before all processes had met{START_AGAIN}"
        if sentence and not is_over.is_set() and ends.acquire(blocking=False):
            print(f"error: {sentence}", file=sys.__stderr__, flush=True)
            _tell(lines, sentence)
            if index != 0:  # the others need JAX's service, which ends with this process
                time.sleep(FAILURE_MESSAGE_S)
            end(FAILED)

    for each in lines.items():
        threading.Thread(target=watch, args=each, daemon=True).start()
    told = None
    try:
        yield
        told = ""
    except Exception:
        time.sleep(_MOMENT_S)  # if another process has ended, which is why, a thread says so
        while ends.locked():
            time.sleep(_MOMENT_S)
        raise
    finally:
        is_over.set()
        _tell(lines, told)


def _tell(lines: Lines, sentence: str | None) -> None:
    """Sends the last words of this process, or None that it ends."""
    for line in lines.values():
        with suppress(OSError):
            if sentence is not None:
                send_fields(line, sentence=sentence)
            line.shutdown(socket.SHUT_WR)  # the other end may not have spoken yet


def _call(
    place: Place, coordinator: str, until: float, wait_s: float, token: bytes
) -> tuple[str | None, Lines]:
    def greet(visitor: socket.socket, until: float) -> Visitor:
        fields = ask(visitor, token, until, hello=_HELLO)
        if {type(fields.get(name)) for name in ("index", "count")} != {int}:
            raise ValueError("no process of a run")
        return visitor, fields

    try:
        listener = open_port(*split(coordinator))
    except OSError as error:
        raise _closed(coordinator, error) from None
    with closing(listener):
        alone = None if is_everywhere(listener) else _written(listener)
        with closing(visitors(listener, greet, until)) as came:
            there, sentence = _gathered(place, came, is_ours=bool(token))
    missing = [i for i in range(1, place.count) if i not in there]
    if missing and not sentence:
        sentence = f"{_listed(missing)} of {place.count} did not come to {coordinator} within {wait_s:g} s: {_ADVICE}"
    for visitor in there.values():
        _send_verdict(visitor, sentence)
    if sentence:
        raise UserError(sentence)
    return alone, there


def _gathered(place: Place, came: Iterable[Visitor], *, is_ours: bool) -> tuple[Lines, str]:
    """Returns the connections of the processes that have come, and why the run cannot begin, or "".
    Unless `is_ours`, a visitor may be of another job, and does not end this one."""
    there: Lines = {}
    sentence = ""
    if place.count == 1:
        return there, sentence
    for visitor, fields in came:
        if complaint := _complaint(place, fields):
            _send_verdict(visitor, sentence := complaint)
            if is_ours:
                return there, sentence
            continue
        index = fields["index"]
        if index in there and _is_open(there[index]):
            _send_verdict(visitor, f"process {index} of this run is there already: {_ADVICE}")
            continue
        there[index] = visitor
        # A process may have come and gone again.
        there = {i: one for i, one in there.items() if _is_open(one)}
        if len(there) == place.count - 1:
            return there, ""
    return there, sentence


def _written(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_ADVICE = (
    "start all of them with the same coordinator and number of processes, each with a number of its own, "
    f"where they can reach that address, and with the same {TOKEN}, if any."
)


def _send_verdict(visitor: socket.socket, sentence: str) -> None:
    """Tells a process to go on, or why it cannot."""
    with suppress(OSError):
        send_fields(visitor, go=not sentence, sentence=sentence)
    if sentence:
        visitor.close()


def _complaint(place: Place, fields: Mapping[str, Any]) -> str:
    index, count = fields["index"], fields["count"]
    if count == place.count and 0 < index < count:
        return ""
    return f"process {index} was started as one of {count} and process 0 as one of {place.count}: {_ADVICE}"


def _is_open(connection: socket.socket) -> bool:
    try:
        connection.setblocking(False)
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        connection.setblocking(True)


def _answer(
    place: Place, coordinator: str, until: float, wait_s: float, token: bytes
) -> socket.socket:
    host, port = split(coordinator)
    why = "it was not tried"
    while (left := until - time.monotonic()) > 0:
        with ExitStack() as tried:
            try:
                reached = socket.create_connection((host, port), timeout=min(left, 10))
                connection = tried.enter_context(reached)
                soon = time.monotonic() + min(left, 10)
                answer(connection, token, soon, index=place.index, count=place.count)
                last = receive_fields(connection, until + _GRACE_S)
            except BROKEN as error:
                why = getattr(error, "strerror", None) or str(error)
                time.sleep(_AGAIN_S)
                continue
            if last.get("go") is True:
                tried.pop_all()
                return connection
            raise UserError(str(last.get("sentence")))
    raise UserError(
        f"process {place.index} did not reach process 0 at {coordinator} within {wait_s:g} s ({why}): {_ADVICE}"
    )


def _closed(coordinator: str, error: OSError) -> UserError:
    taken = error.errno == errno.EADDRINUSE
    advice = "another program has that port; choose another" if taken else "check the address"
    return UserError(
        f"process 0 cannot listen at {coordinator} ({error.strerror or error}): expected an address of this "
        f"machine, as it is process 0, with a port that is free; {advice}."
    )


def _listed(indices: list[int]) -> str:
    names = ", ".join(map(str, indices[:_NAMED]))
    more = f" and {len(indices) - _NAMED} more" if len(indices) > _NAMED else ""
    return f"process{'es' if len(indices) > 1 else ''} {names}{more}"
