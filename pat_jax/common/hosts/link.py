"""Messages between the processes of a run, beside what their devices send each other.

A star: every process has one connection to the first. Each end says that it is alive four times a
`SILENCE_S`, and where its main thread is; who is not heard of for so long, or whose connection breaks
before it has taken its leave, is given up. Knows nothing of what is said.
"""

import pickle
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Literal, NamedTuple

from pat_jax.common.hosts.waiting import At

SILENCE_S = 20.0

Kind = Literal["value", "alive", "stop", "failed", "bye"]


class Message(NamedTuple):
    kind: Kind
    name: str = ""  # what a value is of
    content: Any = None


class Peer:
    """The other end of one connection."""

    def __init__(self, connection: Connection, index: int, host: str):
        self.index, self.host = index, host
        self.values: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.has_left = False
        self.at = At()  # where its main thread was last heard of
        self._connection, self._sends = connection, threading.Lock()
        self._heard = time.monotonic()

    def __str__(self) -> str:
        return f"process {self.index} on {self.host}"

    @property
    def silence_s(self) -> float:
        return time.monotonic() - self._heard

    def send(self, pickled: bytes) -> None:
        """Raises OSError where nobody is there any more."""
        with self._sends:
            self._connection.send_bytes(pickled)

    def receive(self) -> Message:
        """Raises EOFError or OSError where nobody is there any more."""
        message = self._connection.recv()
        self._heard = time.monotonic()
        return message


class Link:
    """One process's connections: of the first to all others, of each other one to the first.

    Args:
      heard: told of what is no value, on a thread of the peer.
      lost: told, on some thread, of a peer that is given up and why.
      beat: called with each heartbeat: where this process's main thread is.
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

    def send(self, message: Message) -> None:
        """To every peer that is still there."""
        pickled = pickle.dumps(message)
        for peer in self.peers:
            if not peer.has_left:
                self._try_send(peer, pickled)

    def post(self, message: Message) -> None:
        """The same, soon and by another thread: a signal's handler must not wait for one that sends."""
        self._posted.put(message)

    def close(self) -> None:
        """Takes leave: from now on nobody is missed."""
        self._is_over = True
        self.send(Message("bye"))

    def _try_send(self, peer: Peer, pickled: bytes) -> None:
        try:
            peer.send(pickled)
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
    """Where the first process listens, for the others to find; handed on by whoever starts them."""

    host: str
    port: int
    key: bytes


def listen(host: str) -> tuple[Listener, Address]:
    """The first process's side.

    Args:
      host: by which the others reach this machine.
    """
    key = secrets.token_bytes(32)
    listener = Listener(("", 0), backlog=1024, authkey=key)
    return listener, Address(host, int(listener.address[1]), key)


def accept(listener: Listener, count: int) -> list[Peer]:
    """Waits for `count` others, which may come in any order."""
    peers = []
    while len(peers) < count:
        connection = listener.accept()
        index, host = connection.recv()
        connection.send(socket.gethostname())
        peers.append(Peer(connection, index, host))
    listener.close()
    return sorted(peers, key=lambda peer: peer.index)


def connect(address: Address, index: int) -> list[Peer]:
    """Every other process's side: its one peer is the first."""
    connection = Client((address.host, address.port), authkey=address.key)
    connection.send((index, socket.gethostname()))
    return [Peer(connection, 0, connection.recv())]
