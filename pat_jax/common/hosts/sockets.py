"""Opens the ports of a run's processes, and exchanges their first messages, in lines of JSON.

Anybody may connect: a scanner, a browser, a process of another run. So only short JSON is read, and
each visitor has its own thread and a few seconds. A visitor that sends nothing or something wrong
is dropped. Knows sockets. Does not know what the messages mean.
"""

import errno
import hmac
import ipaddress
import json
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, TypeVar

from pat_jax.common.json_text import parse_json

T = TypeVar("T")

GREETING_S = 10.0  # for a visitor to say who it is
_LONGEST = 8192  # bytes of a line
_LOOK_S = 0.1  # how often a listener checks whether it should end
_MOST_VISITORS = 4096  # greeted at once: no run has more processes

# Errors of a broken line or connection.
BROKEN = (OSError, ValueError, EOFError)


def split(address: str) -> tuple[str, int]:
    """Returns host and port of `host:port` or `[host]:port`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def open_port(host: str, port: int = 0) -> socket.socket:
    """Opens a port that is reached as `host`. Listens on that address only, if this machine has it;
    otherwise on all interfaces, such as behind the name of a service. Raises OSError if the port is
    taken, or if `host` has no address."""
    kind, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    address = str(place[0])
    # Many systems give their own name a loopback address, which no other host can reach.
    if _is_loopback(address) <= (host == "localhost" or _is_loopback(host)):
        try:
            return _bound(kind, (address, port))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    return _bound(kind, ("", port))


def is_everywhere(listener: socket.socket) -> bool:
    """Returns whether the port is open on all interfaces."""
    return ipaddress.ip_address(listener.getsockname()[0]).is_unspecified


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:  # it is a name
        return False


def _bound(kind: int, place: tuple[Any, ...]) -> socket.socket:
    listener = socket.socket(kind, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def send_fields(to: socket.socket, **fields: Any) -> None:
    to.sendall(json.dumps(fields).encode() + b"\n")


def receive_fields(of: socket.socket, until: float) -> dict[str, Any]:
    """Receives one line, a JSON object, before `time.monotonic()` reaches `until`. Raises OSError
    or EOFError if no line comes, and ValueError if it is not a JSON object."""
    line = bytearray()
    while not line.endswith(b"\n"):
        of.settimeout(max(until - time.monotonic(), 0.001))
        # One byte at a time: what follows the line belongs to the next reader.
        byte = of.recv(1)
        if not byte:
            raise EOFError("the other end has closed the connection")
        line += byte
        if len(line) > _LONGEST:
            raise ValueError("a line is too long")
    of.settimeout(None)
    value = parse_json(line.decode())
    if not isinstance(value, dict):
        raise ValueError("a line is no object")
    return value


def ask(visitor: socket.socket, key: bytes, until: float, **told: Any) -> dict[str, Any]:
    """Makes a visitor prove that it has the `key`. Then proves to the visitor that this process has
    it, and sends the fields `told`. Returns the visitor's fields. Raises what `receive_fields`
    does, and ValueError if the visitor's proof is wrong."""
    send_fields(visitor, prove=(question := secrets.token_hex(32)))
    fields = receive_fields(visitor, until)
    _check(key, fields, "other", question)
    send_fields(visitor, **told, proof=_proof(key, told, "first", fields.get("prove")))
    return fields


def answer(first: socket.socket, key: bytes, until: float, **told: Any) -> dict[str, Any]:
    """Does the visitor's part of `ask`: sends the fields `told`, and returns the other end's."""
    question = receive_fields(first, until).get("prove")
    told["prove"] = secrets.token_hex(32)
    send_fields(first, **told, proof=_proof(key, told, "other", question))
    fields = receive_fields(first, until)
    _check(key, fields, "first", told["prove"])
    return fields


def _proof(key: bytes, fields: dict[str, Any], who: str, question: object) -> str:
    content = json.dumps([who, question, fields], sort_keys=True)
    return hmac.digest(key, content.encode(), "sha256").hex()


def _check(key: bytes, fields: dict[str, Any], who: str, question: str) -> None:
    proof = str(fields.pop("proof", ""))
    if not hmac.compare_digest(proof.encode(), _proof(key, fields, who, question).encode()):
        raise ValueError("what is there is of no process of this job")


def visitors(
    listener: socket.socket, greet: Callable[[socket.socket, float], T], until: float
) -> Generator[T, None, None]:
    """Yields the result of `greet` for each visitor, until `time.monotonic()` reaches `until`.
    `greet` gets a connection and a deadline; a visitor for which it raises `BROKEN` is dropped."""
    found: queue.SimpleQueue[tuple[socket.socket, T]] = queue.SimpleQueue()
    room = threading.BoundedSemaphore(_MOST_VISITORS)
    is_over = threading.Event()
    # A thread that waits in accept() keeps the port open, even if another thread has closed it.
    listener.settimeout(_LOOK_S)

    def meet(visitor: socket.socket) -> None:
        try:
            found.put((visitor, greet(visitor, time.monotonic() + GREETING_S)))
        except BROKEN:
            visitor.close()
        finally:
            room.release()

    def accept() -> None:
        while not is_over.is_set():
            with suppress(OSError):  # nobody has come, or has gone again
                visitor, _ = listener.accept()
                room.acquire()
                threading.Thread(target=meet, args=(visitor,), daemon=True).start()

    door = threading.Thread(target=accept, daemon=True)
    door.start()
    try:
        while (left := until - time.monotonic()) > 0:
            with suppress(queue.Empty):
                yield found.get(timeout=min(left, 0.2))[1]
    finally:
        is_over.set()
        door.join()
        while not found.empty():  # visitors that came too late
            found.get()[0].close()
