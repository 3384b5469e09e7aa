"""Messages between the processes of a run, apart from what their devices send each other.

The connections form a star: every process has one to the first. Each end sends four heartbeats per
`SILENCE_S`, which tell where its main thread is. A peer counts as lost if it is silent for
`SILENCE_S`, or if its connection breaks before it has said goodbye. Each message has an
authentication code, which is checked before the message is parsed (`wire.py`). Does not know what
messages mean.
"""

import hmac
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple, Self

from pat_jax.common.hosts import wire
from pat_jax.common.hosts.waiting import At

SILENCE_S = 20.0

Kind = Literal["value", "alive", "stop", "failed", "bye"]


class Message(NamedTuple):
    kind: Kind
    name: str = ""  # what the processes agree on or gather
    content: Any = None


class Peer:
    """The other end of one connection."""

    def __init__(self, connection: Connection, key: bytes, index: int, host: str):
        self.index = index
        self.host = host
        self._key = key
        self.values: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.has_left = False
        self.at = At()  # where its main thread was at the last heartbeat
        self._connection = connection
        self._sends = threading.Lock()
        self._heard = time.monotonic()

    @classmethod
    def over(cls, line: socket.socket, key: bytes, index: int, host: str) -> Self:
        """Returns the peer at the other end of `line`, a socket that now belongs to it."""
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(Connection(line.detach()), key, index, host)

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
        except wire.UNREADABLE as error:
            raise OSError(f"what was received cannot be read ({error})") from None
        self._heard = time.monotonic()
        return message


@dataclass
class Link:
    """One process's connections: from the first to all others, from any other to the first.

    Attributes:
      heard: called on a peer's thread with each message except values, goodbyes and heartbeats.
      lost: called with a lost peer and the reason, on any thread.
      beat: called for each heartbeat; returns where this process's main thread is.
    """

    peers: Sequence[Peer]
    heard: Callable[[Peer, Message], None]
    lost: Callable[[Peer, str], None]
    beat: Callable[[], At]
    _is_over: bool = False
    _posted: queue.SimpleQueue[Message] = field(default_factory=queue.SimpleQueue)

    def start(self) -> None:
        """Listens to the peers from now on. A peer may be gone already: `lost` must be able to use
        this link."""
        for peer in self.peers:
            threading.Thread(target=self._listen, args=(peer,), daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def send(self, message: Message) -> None:
        """Sends a message to every peer that has not left."""
        written = wire.to_bytes(message)
        for peer in self.peers:
            if peer.has_left:
                continue
            try:
                peer.send(written)
            except OSError as error:
                self._give_up(peer, f"cannot be reached ({error})")

    def post(self, message: Message) -> None:
        """Has another thread send the message soon: a signal handler must not wait."""
        self._posted.put(message)

    def close(self) -> None:
        """Says goodbye; from now on no peer counts as lost."""
        self._is_over = True
        self.send(Message("bye"))

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
                    self.heard(peer, message)
        except (EOFError, OSError):
            self._give_up(peer, "has ended")

    def _watch(self) -> None:
        while not self._is_over:
            self.send(Message("alive", content=self.beat()))
            with suppress(queue.Empty):
                self.send(self._posted.get(timeout=SILENCE_S / 4))
            for peer in self.peers:
                if not peer.has_left and peer.silence_s > SILENCE_S:
                    self._give_up(peer, f"has not been heard of for {SILENCE_S:.0f} s")

    def _give_up(self, peer: Peer, why: str) -> None:
        if not (self._is_over or peer.has_left):
            self.lost(peer, why)


_CODE_BYTES = 32


def _code(key: bytes, content: bytes) -> bytes:
    return hmac.digest(key, content, "sha256")
