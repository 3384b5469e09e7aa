"""Processes that score responses and that can be killed, children and all.

Knows processes and time limits. Does not know which response is scored when, or again
(`reward_scorer.py`), what a reward means, nor jax.
"""

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection

from pat_jax.common.errors import UserError
from pat_jax.rl.responses import Response
from pat_jax.rl.reward_outcome import Cause, Failure, Outcome

_IMPORT_SECONDS = 300.0
_END_SECONDS = 5.0  # from its last word to its end
_COMMAND = (
    "import sys; sys.path[:] = sys.argv[5:]; from pat_jax.rl.reward_process import serve; "
    "serve(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))"
)


class RewardWorkers:
    """Runs the function that `spec` names (`rewards.resolve_reward`), each call within its limit.

    Args:
      num_workers: calls at a time; processes start when they are first needed.
      memory: GiB that a process may have; 0: no limit.

    Raises UserError if the function cannot be imported.
    """

    def __init__(self, spec: str, num_workers: int, memory: float):
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward-worker")
        self._workers = [_Worker(spec, memory) for _ in range(num_workers)]
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()  # one that runs before a new one
        for worker in self._workers:
            self._idle.put(worker)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            if mistake := self._workers[-1].start():
                raise UserError(mistake)
            on_failure.pop_all()

    def close(self) -> None:
        """Kills the processes, whatever they are at: what has not been scored never will be."""
        for worker in self._workers:
            worker.close()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.end()

    def submit(self, responses: Sequence[Response], seconds: float) -> Future[Outcome]:
        """One call, killed when it has run for `seconds`."""
        return self._threads.submit(self._call, responses, seconds)

    def _call(self, responses: Sequence[Response], seconds: float) -> Outcome:
        worker = self._idle.get()
        try:
            return worker.call(responses, seconds)
        finally:
            self._idle.put(worker)


class _Worker:
    """One process at a time, started again after it was killed or has ended.

    A process of its own, not one of `multiprocessing`: that would run the command's file again,
    which for the trainer means jax and the models.
    """

    def __init__(self, spec: str, memory: float):
        self._spec, self._memory = spec, memory
        self._running: _Running | None = None
        self._is_closed, self._lock = False, threading.Lock()

    def call(self, responses: Sequence[Response], seconds: float) -> Outcome:
        if self._running is None and (mistake := self.start()):
            return Outcome(mistake=mistake)
        assert self._running is not None
        calls = self._running.calls
        try:
            calls.send(responses)
            if calls.poll(seconds):
                return calls.recv()
        except (EOFError, OSError):
            return Outcome(failure=Failure(Cause.CRASHED, self.end(_END_SECONDS)))
        self.end()
        text = f"took longer than {seconds:g} s and was killed"
        return Outcome(failure=Failure(Cause.TIMEOUT, text), seconds=seconds)

    def start(self) -> str:
        """Starts the process, with the function imported. Returns what is wrong with it, if any."""
        with self._lock:
            if self._is_closed:
                return "the rewards are closed"
            self._running = _Running.start(self._spec, self._memory)
        mistake = self._wait_for_import(self._running.calls)
        if mistake:
            self.end()
        return mistake

    def _wait_for_import(self, calls: Connection) -> str:
        try:
            if calls.poll(_IMPORT_SECONDS):
                return calls.recv()
        except (EOFError, OSError):
            return (
                f"reward {self._spec!r} {self.end(_END_SECONDS)} while it was imported: expected a "
                "module that imports; correct it."
            )
        return (
            f"reward {self._spec!r} did not finish importing in {_IMPORT_SECONDS:g} s: expected an "
            "import without long work; move that work into the function."
        )

    def close(self) -> None:
        """Callable from any thread; the thread that waits for the process sees that it has ended."""
        with self._lock:
            self._is_closed = True
            if self._running is not None:
                self._running.kill()

    def end(self, patience: float = 0.0) -> str:
        """Ends the process, unless it ends by itself in `patience` seconds. Returns how it did."""
        with self._lock:
            running, self._running = self._running, None
        return running.end(patience) if running else ""


@dataclass(frozen=True)
class _Running:
    process: subprocess.Popen
    calls: Connection
    lifeline: int  # a file: the process ends when no other has it open

    @classmethod
    def start(cls, spec: str, memory: float) -> "_Running":
        calls, theirs = socket.socketpair()
        watched, lifeline = os.pipe()
        passed = (theirs.fileno(), watched)
        process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, spec, str(memory), *map(str, passed), *sys.path],
            stdin=subprocess.DEVNULL,
            pass_fds=passed,
            start_new_session=True,  # Ctrl-C is not for it, and its children can be killed with it
        )
        theirs.close()
        os.close(watched)
        return cls(process, Connection(calls.detach()), lifeline)

    def kill(self) -> None:
        """The process and its children, which are of its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self, patience: float) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        self.kill()
        code = self.process.wait()
        self.calls.close()
        os.close(self.lifeline)
        if code >= 0:
            return f"ended its process with code {code}"
        hint = " (out of memory?)" if -code == signal.SIGKILL else ""
        return f"ended its process with {signal.Signals(-code).name}{hint}"
