"""Messages between the processes of a run, beside what their devices send each other.

A star: every process has one connection to the first, which passes on what another tells. Each end
sends four heartbeats per `SILENCE_S`, with the place of its main thread. A peer counts as lost if
it is silent for that long, or if its connection breaks before it has said goodbye. Each message
has an authentication code, which is checked before it is read (`wire.py`). Does not know what the
messages mean.
"""

import hmac
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

from pat_jax.common.errors import UserError
from pat_jax.common.hosts import wire
from pat_jax.common.hosts.sockets import (
    GREETING_S,
    answer,
    ask,
    open_port,
    visitors,
)
from pat_jax.common.hosts.waiting import At

SILENCE_S = 20.0

Kind = Literal["value", "told", "alive", "stop", "failed", "bye"]


class Message(NamedTuple):
    kind: Kind
    name: str = ""  # what the processes agree on or gather; of what is told, who listens
    content: Any = None


class Peer:
    """The other end of one connection."""

    def __init__(self, connection: Connection, key: bytes, index: int, host: str):
        self.index, self.host = index, host
        self._key = key
        self.values: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.has_left = False
        self.at = At()  # where its main thread was at the last heartbeat
        self._connection, self._sends = connection, threading.Lock()
        self._heard = time.monotonic()

    def __str__(self) -> str:
        return f"process {self.index} on {self.host}"

    @property
    def silence_s(self) -> float:
        return time.monotonic() - self._heard

    def send(self, written: bytes) -> None:
        """Sends a message, written by `wire`. Raises OSError if the peer is gone."""
        with self._sends:
            self._connection.send_bytes(_code(self._key, written) + written)

    def receive(self) -> Message:
        """Receives a message. Raises EOFError or OSError if the peer is gone, and OSError if the
        message is not authentic, or was written by another version."""
        content = self._connection.recv_bytes()
        code, written = content[:_CODE_BYTES], content[_CODE_BYTES:]
        if not hmac.compare_digest(code, _code(self._key, written)):
            raise OSError("what was received is of no process of this run")
        try:
            message = wire.of_bytes(written)
        except (ValueError, TypeError, LookupError, AttributeError, ImportError) as error:
            raise OSError(f"what was received cannot be read ({error})") from None
        self._heard = time.monotonic()
        return message


class Link:
    """One process's connections: from the first to all others, from any other to the first.

    Args:
      heard: called on a peer's thread with each message except values, goodbyes and heartbeats.
      lost: called with a lost peer and the reason, on any thread.
      beat: called for each heartbeat; returns where this process's main thread is.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        heard: Callable[[Peer, Message], None],
        lost: Callable[[Peer, str], None],
        beat: Callable[[], At],
    ):
        self.peers = peers
        self._heard, self._lost, self._beat = heard, lost, beat
        self._is_over = False
        self._posted: queue.SimpleQueue[Message] = queue.SimpleQueue()
        for peer in peers:
            threading.Thread(target=self._listen, args=(peer,), daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def send(self, message: Message, but: Peer | None = None) -> None:
        """Sends a message to every peer that has not left, `but` one."""
        written = wire.to_bytes(message)
        for peer in self.peers:
            if peer is not but and not peer.has_left:
                self._try_send(peer, written)

    def post(self, message: Message) -> None:
        """Has another thread send the message soon: a signal handler must not wait."""
        self._posted.put(message)

    def close(self) -> None:
        """Says goodbye; from now on no peer counts as lost."""
        self._is_over = True
        self.send(Message("bye"))

    def _try_send(self, peer: Peer, written: bytes) -> None:
        try:
            peer.send(written)
        except OSError as error:
            self._give_up(peer, f"cannot be reached ({error})")

    def _listen(self, peer: Peer) -> None:
        try:
            while not peer.has_left:
                message = peer.receive()
                if message.kind == "value":
                    peer.values.put(message)
                elif message.kind == "bye":
                    peer.has_left = True
                elif message.kind == "alive":
                    peer.at = message.content
                else:
                    if message.kind == "told":
                        self.send(message, but=peer)
                    self._heard(peer, message)
        except (EOFError, OSError):
            self._give_up(peer, "has ended")

    def _watch(self) -> None:
        while not self._is_over:
            self.send(Message("alive", content=self._beat()))
            with suppress(queue.Empty):
                self.send(self._posted.get(timeout=SILENCE_S / 4))
            for peer in self.peers:
                if not peer.has_left and peer.silence_s > SILENCE_S:
                    self._give_up(peer, f"has not been heard of for {SILENCE_S:.0f} s")

    def _give_up(self, peer: Peer, why: str) -> None:
        if not (self._is_over or peer.has_left):
            self._lost(peer, why)


class Address(NamedTuple):
    """Where the first process listens, for the others to find."""

    host: str
    port: int
    key: bytes


def listen(host: str) -> tuple[socket.socket, Address]:
    """Opens the first process's port. `host` is the name by which others reach this machine."""
    listener = open_port(host)
    return listener, Address(host, int(listener.getsockname()[1]), secrets.token_bytes(32))


def accept(listener: socket.socket, key: bytes, count: int, wait_s: float) -> list[Peer]:
    """Waits for `count` other processes, which may come in any order; other visitors are dropped.
    Returns them by index. Raises UserError if one does not come within `wait_s`."""

    def greet(visitor: socket.socket, until: float) -> Peer:
        fields = ask(visitor, key, until, host=socket.gethostname())
        index, host = fields.get("index"), fields.get("host")
        if type(index) is not int or not isinstance(host, str):
            raise ValueError("no process of this run")
        visitor.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Peer(Connection(visitor.detach()), key, index, host)

    peers: dict[int, Peer] = {}
    port = listener.getsockname()[1]
    came = visitors(listener, greet, time.monotonic() + wait_s)
    with closing(listener), closing(came):
        for peer in came:
            peers[peer.index] = peer
            if len(peers) == count:
                return [peers[index] for index in sorted(peers)]
    raise UserError(
        f"{len(peers)} of {count} other processes of this run came to port {port} of process 0 "
        f"within {wait_s:g} s: expected all; see that nothing between the hosts closes that port."
    )


def connect(address: Address, index: int) -> list[Peer]:
    """Connects another process to the first, and returns that as its one peer. Raises UserError if
    the first cannot be reached, or if what answers is another program."""
    try:
        reached = socket.create_connection((address.host, address.port), timeout=GREETING_S)
        with closing(reached) as first:
            until = time.monotonic() + GREETING_S
            fields = answer(first, address.key, until, index=index, host=socket.gethostname())
            first.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(first.detach())
    except (OSError, ValueError, EOFError) as error:
        raise UserError(
            f"process {index} did not reach process 0 at {address.host}:{address.port} ({error}): expected a port "
            "that every process can reach; see that nothing between the hosts closes it."
        ) from None
    return [Peer(connection, address.key, 0, str(fields.get("host")))]


_CODE_BYTES = 32


def _code(key: bytes, content: bytes) -> bytes:
    return hmac.digest(key, content, "sha256")
