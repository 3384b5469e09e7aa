"""Checks that all processes of a run are there, before JAX does. If one is missing, JAX aborts the
process in C++, without a message for the user.

The first process listens at the coordinator's address until every other one has sent its index. It
tells them to go on, or why not, and leaves the port to JAX. The messages have no other effect: they
contain no secret, and only JSON is read.
"""

import errno
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from typing import Any

from pat_jax.common.errors import UserError
from pat_jax.common.hosts.place import Place
from pat_jax.common.hosts.sockets import (
    BROKEN,
    is_everywhere,
    open_port,
    receive_fields,
    send_fields,
    split,
    visitors,
)

_HELLO = "pat_jax roll call 1"
_AGAIN_S = 0.25  # between two tries to reach the first process
_GRACE_S = 15.0  # for the first process's answer, after its own time is over
_NAMED = 8  # processes named in a sentence

Visitor = tuple[socket.socket, Mapping[str, Any]]  # a connection, and the fields it has sent


def roll_call(place: Place, wait_s: float) -> str | None:
    """Waits until every process is there. In the first process, returns the one address that it
    listened at, or None if it was all interfaces; in others, None. Raises UserError if a process
    did not come within `wait_s`, or was started with another number of processes."""
    assert place.coordinator is not None
    until = time.monotonic() + wait_s
    if place.index == 0:
        return _call(place, place.coordinator, until, wait_s)
    _answer(place, place.coordinator, until, wait_s)
    return None


def _call(place: Place, coordinator: str, until: float, wait_s: float) -> str | None:
    try:
        listener = open_port(*split(coordinator))
    except OSError as error:
        raise _closed(coordinator, error) from None
    with closing(listener):
        alone = None if is_everywhere(listener) else _written(listener)
        with closing(visitors(listener, _greet, until)) as came:
            there, sentence = _gathered(place, came)
    missing = [i for i in range(1, place.count) if i not in there]
    if missing and not sentence:
        sentence = f"{_listed(missing)} of {place.count} did not come to {coordinator} within {wait_s:g} s: {_ADVICE}"
    for visitor in there.values():
        _send_verdict(visitor, sentence)
    if sentence:
        raise UserError(sentence)
    return alone


def _gathered(place: Place, came: Iterable[Visitor]) -> tuple[dict[int, socket.socket], str]:
    """Returns the connections of the processes that have come, and why the run cannot begin, or
    ""."""
    there: dict[int, socket.socket] = {}
    if place.count == 1:
        return there, ""
    for visitor, fields in came:
        if sentence := _complaint(place, fields):
            _send_verdict(visitor, sentence)
            return there, sentence
        index = fields["index"]
        if index in there and _is_open(there[index]):
            _send_verdict(visitor, f"process {index} of this run is there already: {_ADVICE}")
            continue
        there[index] = visitor
        # A process may have come and gone again.
        there = {i: one for i, one in there.items() if _is_open(one)}
        if len(there) == place.count - 1:
            break
    return there, ""


def _written(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_ADVICE = (
    "start all of them with the same coordinator and number of processes, each with a number of its own, "
    "where they can reach that address."
)


def _send_verdict(visitor: socket.socket, sentence: str) -> None:
    """Tells a process to go on, or why it cannot."""
    with closing(visitor), suppress(OSError):
        send_fields(visitor, go=not sentence, sentence=sentence)


def _greet(visitor: socket.socket, until: float) -> Visitor:
    send_fields(visitor, hello=_HELLO)
    fields = receive_fields(visitor, until)
    kinds = {type(fields.get(name)) for name in ("index", "count")}
    if fields.get("hello") != _HELLO or kinds != {int}:
        raise ValueError("no process of a run")
    return visitor, fields


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


def _answer(place: Place, coordinator: str, until: float, wait_s: float) -> None:
    host, port = split(coordinator)
    why = "it was not tried"
    while (left := until - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=min(left, 10)) as connection:
                first = receive_fields(connection, time.monotonic() + min(left, 10))
                if first.get("hello") != _HELLO:
                    raise ValueError("what answers there is no pat_jax")
                send_fields(connection, hello=_HELLO, index=place.index, count=place.count)
                last = receive_fields(connection, until + _GRACE_S)
        except BROKEN as error:
            why = getattr(error, "strerror", None) or str(error)
            time.sleep(_AGAIN_S)
            continue
        if last.get("go") is True:
            return
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
