"""A process that does with what came with the weights (a chat template, a tokenizer) what may not
end, or may end the process: within limits, and with an answer or none.

Knows the process and its limits (`chat_worker.py` is what it runs). Does not know what is asked.
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
    """Limits of one answer."""

    seconds: float  # of the processor
    num_bytes: int  # beside what the process holds before


class Answer(NamedTuple):
    text: str | None  # None: it failed
    error: str  # what it raised
    seconds: float  # of the processor, that it took


class WorkerDied(Exception):
    """The process has ended, and not by itself."""

    def __init__(self, code: int):
        super().__init__(f"code {code}")
        self.code = code  # as `subprocess` has it: negative for a signal


class TextWorker:
    """One process; serves one thread at a time, and ends with this object."""

    def __init__(self) -> None:
        # -P: the files beside the script are no modules.
        command, pipe = [sys.executable, "-P", str(_WORKER)], subprocess.PIPE
        self.process = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.DEVNULL,  # what a library says there is in the answer as well
            start_new_session=True,  # Ctrl-C is not for it: it ends with its input
        )
        self._finalizer = weakref.finalize(self, _end, self.process)

    def begin(self, limits: Limits, kind: str, *told: Any) -> None:
        """Asks; the process works while this one does something else."""
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # `answer` says so
            pickle.dump((kind, limits, *told), self.process.stdin)
            self.process.stdin.flush()

    def answer(self) -> Answer:
        """The answer to what was begun last.

        Raises:
          WorkerDied: there is none, and there will be no more.
        """
        assert self.process.stdout
        # JSON: what runs a stranger's template does not get to say what this process unpickles.
        line = self.process.stdout.readline()
        if not line.endswith(b"\n"):
            self._finalizer()
            raise WorkerDied(self.process.returncode)
        return Answer(*json.loads(line))


_idle: list[TextWorker] = []


def take() -> TextWorker:
    """One that nobody uses: starting it takes a second."""
    return _idle.pop() if _idle else TextWorker()


def give_back(worker: TextWorker) -> None:
    """The next caller may have it."""
    _idle.append(worker)


def _end(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe
        with contextlib.suppress(BrokenPipeError):  # of what was not read any more
            pipe.close()
    process.wait()
