"""What the processes of a run do together: decide once, gather values, stop, and end.

Every process runs the same program on the same inputs, and issues the same programs to its devices
in the same order. Some decisions do not follow from the inputs: a plan depends on clocks, others on
the file system or on signals. The first process makes them and sends them to the others (`agree`).
Each process may compute a share of something; `gather` gives all shares to all processes.

A process has one `ProcessGroup`, as it has one `jax.process_index()`. A run of one process spends
no time in it.
"""

import math
import os
import queue
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pat_jax.common.errors import UserError
from pat_jax.common.hosts.link import Link, Message, Peer
from pat_jax.common.hosts.waiting import START_AGAIN, At, Stall, Wait

T = TypeVar("T")

FAILURE_MESSAGE_S = 2.0  # how long a process that fails waits for the others to get the reason
FAILED = 1  # exit code where another process was lost


class ProcessGroup:
    """The processes of this run, as seen by one of them."""

    def __init__(self, index: int = 0, count: int = 1, patience_s: float = math.inf):
        self.index = index
        self.count = count
        self._patience_s = patience_s  # how long to wait for a process that makes no progress
        self.stop_number: int | None = None  # number of the signal to stop that a process has got
        self.may_stop: Callable[[], bool] = lambda: False
        self.stop: Callable[[int], None] = lambda number: None
        self.end: Callable[[int], None] = _end  # ends this process at once
        self._link: Link | None = None
        self._ends = threading.Lock()  # held by the one thread that ends this process
        self._scratch: Any = None
        self._at = At()
        self._thread = threading.get_ident()
        self._stall = Stall(patience_s)

    def __str__(self) -> str:
        return f"process {self.index} on {socket.gethostname()}"

    def meet(self, peers: list[Peer]) -> None:
        self._link = Link(peers, self._handle, self._lose, lambda: self._beat(peers))
        self._link.start()

    def reach_point(self, name: str) -> None:
        """Notes that this process makes progress. The next heartbeat tells the others, so that they
        do not give up waiting for it."""
        self._at = self._at.next(name)
        self._thread = threading.get_ident()

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_alone(self) -> bool:
        return self.count == 1

    @property
    def is_ending(self) -> bool:
        """Whether the run is ending and its reason is printed; later errors follow from it."""
        return self._ends.locked()

    def agree(self, name: str, make: Callable[[], T]) -> T:
        """Returns in every process what `make` returns in the first. All processes must call it, in
        the same order, with the same `name`. Raises the UserError of the first process. If a
        process has got a signal to stop, raises what `stop` raises."""
        if self.is_alone:
            return make()
        self.reach_point(name)
        return self._decide(name, make)

    def gather(self, name: str, value: T, *, trouble: str = "") -> list[T]:
        """Returns in every process the values of all processes, by index. If this process could not
        do its share, `trouble` says so. The others then have only a minute to call this, as they
        may never do so."""
        if self.is_alone:
            return [value]
        self.reach_point(name)
        if self.is_first:
            answers = [self._receive(peer, name, trouble).content for peer in self._peers]
            return self._decide(name, lambda: [value, *answers], is_gathered=True)
        self._send_value(name, value)
        return self._decide(name, list, is_gathered=True, trouble=trouble)

    def compare(self, name: str, value: object) -> None:
        """Ends all processes if one of them has another `value` than the first process."""
        answers = self.gather(name, value)
        if others := [i for i, one in enumerate(answers) if one != answers[0]]:
            self.fail(
                f"process {others[0]} has come to another decision than process 0 ({name}: "
                f"{answers[others[0]]}, not {answers[0]}): please report it.",
                FAILED,
            )

    def folder(self, path: Path) -> Path:
        """Returns the folder where this process writes what the first writes into `path`. For other
        processes it is a temporary folder, so that each file has one writer."""
        if self.is_first:
            return path
        if self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="pat_jax_process_")
        folder = Path(self._scratch.name) / path.name
        folder.mkdir(exist_ok=True)
        return folder

    def ask_to_stop(self, number: int) -> None:
        """Passes on a signal to stop. All processes stop when they next call `agree`."""
        if self.is_first:
            self.stop_number = number
        else:
            assert self._link is not None
            self._link.post(Message("stop", content=number))

    def leave(self) -> None:
        """Waits until every process has reached its end, and disconnects."""
        if self._link is not None:
            self.may_stop = lambda: False  # too late to stop
            self.gather("end", None)
            self._link.close()
            self._link = None
            import jax  # not at the top: options are read without JAX

            jax.distributed.shutdown()

    def fail(self, sentence: str, code: int) -> None:
        """Prints why this process cannot go on and ends all of them; does nothing if it is
        alone."""
        if self._link is not None:
            with self._ends:
                print(f"error: {sentence}", file=sys.__stderr__, flush=True)
                self._notify(sentence, code)

    @property
    def _peers(self) -> list[Peer]:
        assert self._link is not None
        return list(self._link.peers)

    def _decide(
        self, name: str, make: Callable[[], Any], *, is_gathered: bool = False, trouble: str = ""
    ) -> Any:
        if not self.is_first:
            (first,) = self._peers
            kind, content = self._receive(first, name, trouble).content
        else:
            kind, content = self._made(make, can_stop=not is_gathered)
            self._send_value(name, (kind, content))
        if kind == "stop":
            self.stop(content)
        if kind == "error":
            raise content
        return content

    def _made(self, make: Callable[[], Any], *, can_stop: bool) -> tuple[str, Any]:
        if can_stop and self.stop_number is not None and self.may_stop():
            # Only once, as saving after the stop agrees on things as well.
            number = self.stop_number
            self.stop_number = None
            return "stop", number
        try:
            return "made", make()
        except UserError as error:
            return "error", UserError(str(error))

    def _send_value(self, name: str, content: Any) -> None:
        assert self._link is not None
        self._link.send(Message("value", name, content))

    def _receive(self, peer: Peer, name: str, trouble: str) -> Message:
        message = self._next(peer, name, trouble)
        if message.name != name:
            self.fail(
                f"process {self.index} is at {name!r} and {peer} at {message.name!r}: the processes have come apart; "
                "please report it, with --rollout.check_integrity true for where they did.",
                FAILED,
            )
        return message

    def _next(self, peer: Peer, name: str, trouble: str) -> Message:
        """Waits for a peer's next value. Ends all processes if the peer makes no progress for too
        long."""
        if not peer.values.empty():
            return peer.values.get()
        wait = Wait(str(self), str(peer), self.index, name, self._patience_s, trouble)
        self._at = self._at._replace(waits_for=peer.index)
        message = None
        while message is None:
            try:
                message = peer.values.get(timeout=wait.look_s)
            except queue.Empty:
                if wait.is_over(at := peer.at):
                    self.fail(wait.sentence(at), FAILED)
                elif line := wait.line(at):
                    print(line, file=sys.__stderr__, flush=True)
        self._at = self._at._replace(waits_for=None)
        return message

    def _beat(self, peers: Sequence[Peer]) -> At:
        at = self._at.seen(self._thread)
        if self.is_first:
            ats = {str(self): at, **{str(peer): peer.at for peer in peers}}
            if sentence := self._stall.sentence(ats):
                self._give_up(sentence, FAILED)
        return at

    def _handle(self, peer: Peer, message: Message) -> None:
        if message.kind == "stop":
            self.stop_number = message.content
            return
        index, sentence, code = message.content
        # The first process passes on what another has told it.
        if not sentence.startswith(("process ", "processes ")):
            sentence = f"process {index} has ended: {sentence}"
        self._give_up(sentence, code)

    def _lose(self, peer: Peer, why: str) -> None:
        self._give_up(f"{peer} {why}, and the run cannot go on without it{START_AGAIN}", FAILED)

    def _give_up(self, sentence: str, code: int) -> None:
        """Ends this process from a thread, whatever the main thread is waiting for."""
        if self._ends.acquire(blocking=False):
            print(f"error: {sentence}", file=sys.__stderr__, flush=True)
            if self.is_first:
                self._notify(sentence, code)
            self.end(code)

    def _notify(self, sentence: str, code: int) -> None:
        assert self._link is not None
        self._link.send(Message("failed", content=(self.index, sentence, code)))
        time.sleep(FAILURE_MESSAGE_S)
        self.end(code)


def _end(code: int) -> None:
    """Ends this process at once: JAX's own exit would wait for every process."""
    sys.stdout.flush()
    os._exit(code)


_process_group = ProcessGroup()


def process_group() -> ProcessGroup:
    """Returns the processes of this run; before `join`, this process is alone."""
    return _process_group


def found(index: int, count: int, patience_s: float) -> ProcessGroup:
    """Makes this process one of several, and returns their group."""
    global _process_group
    _process_group = ProcessGroup(index, count, patience_s)
    return _process_group
