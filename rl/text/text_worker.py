"""A process that runs a checkpoint's own code (chat template, tokenizer) within limits.

Such code may run for ever, or end the process. Knows the process, which runs `chat_worker.py`, and
the process's limits. Does not know what the requests mean.
"""

import contextlib
import json
import pickle
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any, NamedTuple

_WORKER = Path(__file__).with_name("chat_worker.py")


class Limits(NamedTuple):
    """Limits of the work for one answer."""

    seconds: float  # processor time
    num_bytes: int  # memory in addition to what the process uses before


class Answer(NamedTuple):
    text: str | None  # None if the request failed
    error: str  # the exception's type and message
    seconds: float  # processor time taken


class WorkerDied(Exception):
    """The process has ended without an answer."""

    def __init__(self, code: int):
        super().__init__(f"code {code}")
        self.code = code  # exit code as in `subprocess`: negative for a signal


class TextWorker:
    """One process, for one thread at a time; it ends with this object."""

    def __init__(self) -> None:
        # -P: the files beside the script are no modules.
        command = [sys.executable, "-P", str(_WORKER)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.DEVNULL,  # what a library says there is in the answer as well
            start_new_session=True,  # Ctrl-C is not for it: it ends with its input
        )
        self._finalizer = weakref.finalize(self, _end, self.process)

    def begin(self, limits: Limits, kind: str, *told: Any) -> None:
        """Sends a request (its kind and its data) and returns before it is answered."""
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # `answer` says so
            pickle.dump((kind, limits, *told), self.process.stdin)
            self.process.stdin.flush()

    def answer(self) -> Answer:
        """Waits for the answer to the last request. Raises WorkerDied if the process has ended;
        this worker then gives no more answers."""
        assert self.process.stdout
        # JSON, not pickle: a stranger's template must not choose what this process unpickles.
        line = self.process.stdout.readline()
        if not line.endswith(b"\n"):
            self._finalizer()
            raise WorkerDied(self.process.returncode)
        text, error, seconds = json.loads(line)
        return Answer(text, error, seconds)


_idle: list[TextWorker] = []


def take() -> TextWorker:
    """Returns an idle worker, or starts one, which takes a second."""
    return _idle.pop() if _idle else TextWorker()


def give_back(worker: TextWorker) -> None:
    """Makes an idle worker available to the next caller of `take`."""
    _idle.append(worker)


def _end(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe
        with contextlib.suppress(BrokenPipeError):  # of what was not read any more
            pipe.close()
    process.wait()
