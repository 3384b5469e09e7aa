"""Checks that all processes of a run have come, before JAX does. If one is missing, JAX aborts the
process in C++, without a message for the user.

The first process listens at the coordinator's address until every other one has sent its index. It
sends them a key for their messages (`link.py`), or why they cannot go on, and leaves the port to
JAX. Both sides prove that they have the token of the job (`place.job_token`), without sending it; a
visitor with another token is ignored. Only JSON is read.
"""

import errno
import secrets
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from typing import Any

from pat_jax.common.errors import UserError
from pat_jax.common.hosts.link import Peer
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

_AGAIN_S = 0.25  # between two tries to reach the first process
_GRACE_S = 15.0  # for the first process's answer, after its own time is over
_NAMED = 8  # processes named in a sentence

Visitor = tuple[socket.socket, Mapping[str, Any]]  # a connection, and the fields it has sent


def roll_call(place: Place, wait_s: float, token: bytes = b"") -> tuple[str | None, list[Peer]]:
    """Waits until every process of the run has come. Returns the address at which this process has
    listened, and its peers by index. The address is None if it is all interfaces, and in all
    processes except the first. Raises UserError if a process did not come within `wait_s`, or was
    started with another number of processes."""
    assert place.coordinator is not None
    until = time.monotonic() + wait_s
    if place.index == 0:
        return _call(place, place.coordinator, until, wait_s, token)
    return None, [_answer(place, place.coordinator, until, wait_s, token)]


def _call(
    place: Place, coordinator: str, until: float, wait_s: float, token: bytes
) -> tuple[str | None, list[Peer]]:
    def greet(visitor: socket.socket, until: float) -> Visitor:
        fields = ask(visitor, token, until, host=socket.gethostname())
        kinds = [type(fields.get(name)) for name in ("index", "count", "host")]
        if kinds != [int, int, str]:
            raise ValueError("no process of a run")
        return visitor, fields

    try:
        host, port = split(coordinator)
        listener = open_port(host, port)
    except OSError as error:
        raise _closed(coordinator, error) from None
    with closing(listener):
        alone = None if is_everywhere(listener) else _written(listener)
        with closing(visitors(listener, greet, until)) as came:
            there, sentence = _gathered(place, came, is_ours=bool(token))
    missing = [i for i in range(1, place.count) if i not in there]
    if missing and not sentence:
        sentence = f"{_listed(missing)} of {place.count} did not come to {coordinator} within {wait_s:g} s: {_ADVICE}"
    key = secrets.token_bytes(32)
    for visitor, _ in there.values():
        _send_verdict(visitor, sentence, key)
    if sentence:
        raise UserError(sentence)
    found = sorted(there.items())
    return alone, [Peer.over(line, key + token, i, fields["host"]) for i, (line, fields) in found]


def _gathered(
    place: Place, came: Iterable[Visitor], *, is_ours: bool
) -> tuple[dict[int, Visitor], str]:
    """Returns the processes that have come, by index, and why the run cannot begin, or "". A wrong
    visitor ends the run only if `is_ours`: visitors have proved to be of this job."""
    there: dict[int, Visitor] = {}
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
        if index in there and _is_open(there[index][0]):
            _send_verdict(visitor, f"process {index} of this run is there already: {_ADVICE}")
            continue
        there[index] = visitor, fields
        # A process may have come and gone again.
        there = {i: one for i, one in there.items() if _is_open(one[0])}
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


def _send_verdict(visitor: socket.socket, sentence: str, key: bytes = b"") -> None:
    """Sends a process the key for its messages, or the reason why it cannot go on."""
    with suppress(OSError):
        send_fields(visitor, sentence=sentence, key=key.hex())
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


def _answer(place: Place, coordinator: str, until: float, wait_s: float, token: bytes) -> Peer:
    host, port = split(coordinator)
    told = {"index": place.index, "count": place.count, "host": socket.gethostname()}
    why = "it was not tried"
    while (left := until - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=min(left, 10)) as line:
                fields = answer(line, token, time.monotonic() + min(left, 10), **told)
                last = receive_fields(line, until + _GRACE_S)
                if sentence := last.get("sentence"):
                    raise UserError(str(sentence))
                key = bytes.fromhex(str(last.get("key")))
                return Peer.over(line, key + token, 0, str(fields.get("host")))
        except BROKEN as error:
            why = getattr(error, "strerror", None) or str(error)
            time.sleep(_AGAIN_S)
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
