"""Processes that score responses, and that can be killed with all their children.

Knows processes and time limits. Does not know how calls are sent (`channel.py`), which responses
are scored when or again (`scorer.py`), what a reward means, nor jax.
"""

import contextlib
import itertools
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from pat_jax.common.errors import UserError
from pat_jax.rl.rewards.channel import IMPORT, LOST, Calls, NoAnswerError
from pat_jax.rl.rewards.outcome import Cause, Failure, Outcome
from pat_jax.rl.rewards.responses import Response

_IMPORT_SECONDS = 300.0
_END_SECONDS = 5.0  # seconds that a process may take to end after its socket was closed
# Signals that a process gets only from outside.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_COMMAND = (
    "import sys; sys.path[:] = sys.argv[4:]; from pat_jax.rl.rewards.process import serve; "
    "serve(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))"
)


class RewardWorkers:
    """Runs the function that `spec` names (`rewards.resolve_reward`) with a time limit per call.

    Args:
      num_workers: largest number of calls at a time; processes start when they are first needed.
      memory: GiB that a process may use; 0: no limit.

    Raises UserError if the function cannot be imported.
    """

    def __init__(self, spec: str, num_workers: int, memory: float):
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward-worker")
        self._workers = [_Worker(spec, memory) for _ in range(num_workers)]
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()  # running workers are taken first
        for worker in self._workers:
            self._idle.put(worker)
        if mistake := self._workers[-1].start():
            self.close()
            raise UserError(mistake)

    def close(self) -> None:
        """Kills the processes. Responses without a score stay without one."""
        for worker in self._workers:
            worker.close()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.end()

    def submit(self, responses: Sequence[Response], seconds: float) -> Future[Outcome]:
        """Starts one call, which is killed after `seconds`."""
        return self._threads.submit(self._call, responses, seconds)

    def _call(self, responses: Sequence[Response], seconds: float) -> Outcome:
        worker = self._idle.get()
        try:
            return worker.call(responses, seconds)
        finally:
            self._idle.put(worker)


class _KilledError(Exception):
    """The process was killed by the system (out of memory) or a person. The message says how."""


class _Worker:
    """One process at a time, started again after it was killed or has ended.

    It is not a `multiprocessing` process, which would run the command's file again: the trainer's
    imports jax and the models.
    """

    def __init__(self, spec: str, memory: float):
        self._spec = spec
        self._memory = memory
        self._process: subprocess.Popen | None = None
        self._calls: Calls | None = None
        self._is_closed = False
        self._lock = threading.Lock()
        self._numbers = itertools.count(IMPORT + 1)  # numbers of calls

    def call(self, responses: Sequence[Response], seconds: float) -> Outcome:
        """Calls the function, and once more if the process was killed from outside."""
        return _twice(lambda: self._call(list(responses), seconds))

    def start(self) -> str:
        """Starts the process and imports the function, and once more if it was killed from outside.
        Returns the mistake in the function, or ""."""
        outcome = _twice(self._start)
        if outcome.failure is None:
            return outcome.mistake
        return (
            f"reward {self._spec!r} {outcome.failure.text} while it was imported: expected a module that imports "
            "at once, and memory for --reward_workers processes of each reward; correct the module, "
            "or use fewer processes."
        )

    def _call(self, responses: list[Response], seconds: float) -> Outcome:
        if self._process is None and (mistake := self.start()):
            return Outcome(mistake=mistake)
        return self._answer(next(self._numbers), responses, seconds)

    def _start(self) -> Outcome:
        with self._lock:
            if self._is_closed:
                return Outcome(mistake="the rewards are closed")
            try:
                self._open()
            except OSError as error:
                return Outcome(
                    mistake=f"no process could be started for reward {self._spec!r} ({error.strerror}): expected "
                    "room for --reward_workers processes of each reward; use fewer."
                )
        outcome = self._answer(IMPORT, [], _IMPORT_SECONDS)
        if outcome.mistake or outcome.failure:
            self.end()
        return outcome

    def _open(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as on_failure:
            on_failure.callback(ours.close)
            options = [self._spec, str(self._memory), str(theirs.fileno())]
            self._process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, *options, *sys.path],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # does not get Ctrl-C, and can be killed with its children
            )
            on_failure.pop_all()
        self._calls = Calls(ours)

    def _answer(self, number: int, responses: list[Response], seconds: float) -> Outcome:
        """Returns the answer to a call or, without a call, to the import. If none comes in time,
        ends the process. Raises _KilledError if the process was killed from outside."""
        calls = self._calls
        assert calls is not None
        until = time.monotonic() + seconds
        try:
            if number != IMPORT:
                calls.ask(number, responses, until)
            return calls.answer(number, partial(Outcome.of_json, count=len(responses)), until)
        except TimeoutError:
            self.end()
            text = f"took longer than {seconds:g} s and was killed"
            return Outcome(failure=Failure(Cause.TIMEOUT, text), seconds=seconds)
        except (NoAnswerError, EOFError) as error:
            return Outcome(failure=Failure(Cause.CRASHED, self._why(error)))

    def close(self) -> None:
        """Kills the process, from any thread; a thread that waits for it notices its end."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                _kill(self._process)

    def end(self, patience: float = 0.0) -> int | None:
        """Waits `patience` seconds for the process to end, then kills it and its children. Returns
        its exit code if it ended by itself, else None."""
        with self._lock:
            process = self._process
            calls = self._calls
            self._process = self._calls = None
        if process is None or calls is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
        code = process.returncode
        _kill(process)
        process.wait()
        calls.close()
        return code

    def _why(self, error: NoAnswerError | EOFError) -> str:
        """Ends a process that gave no answer, and returns how it ended, as a clause. Raises
        _KilledError if it was killed from outside."""
        if isinstance(error, NoAnswerError):
            self.end()
            return "wrote to open files that are not its own, so that its process was ended"
        code = self.end(_END_SECONDS)
        if code is None or code == LOST:
            return "closed open files that are not its own, so that its process was ended"
        if code >= 0:
            return f"ended its process with code {code}"
        hint = " (out of memory?)" if -code == signal.SIGKILL else ""
        how = f"ended its process with {_signal_name(-code)}{hint}"
        if -code in _FROM_OUTSIDE and not self._is_closed:
            raise _KilledError(how)
        return how


def _twice(do: Callable[[], Outcome]) -> Outcome:
    """Returns the result of `do`, called once more if a process was killed from outside."""
    try:
        return do()
    except _KilledError:
        pass
    try:
        return do()
    except _KilledError as killed:
        return Outcome(failure=Failure(Cause.CRASHED, f"{killed}, twice"))


def _kill(process: subprocess.Popen) -> None:
    """Kills a process and its children, which are in its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
