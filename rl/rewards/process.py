"""The process that a reward function runs in: it imports the function, then answers calls.

Does not know the function's arguments (`signatures.py`), nor time limits or retries (`workers.py`,
`scorer.py`); imports no jax.
"""

import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from pat_jax.common.errors import UserError
from pat_jax.rl.rewards.channel import IMPORT, Answers
from pat_jax.rl.rewards.outcome import Cause, Failure, Outcome, failure_of
from pat_jax.rl.rewards.responses import Response
from pat_jax.rl.rewards.rewards import resolve_reward
from pat_jax.rl.rewards.signatures import Recognised


def serve(spec: str, memory: float, file: int) -> None:
    """Imports the function and reports any mistake. Then answers each call with an Outcome.

    Args:
      memory: GiB that this process, and each of its children, may use; 0: no limit.
      file: file descriptor of the other end of the caller's socket.
    """
    answers = Answers(socket.socket(fileno=file))
    threading.Thread(target=_die_with_caller, args=(file,), daemon=True).start()
    if memory:
        _limit_memory(int(memory * 2**30))
    os.environ["JAX_PLATFORMS"] = "cpu"  # a reward that uses jax must not touch the accelerator
    sys.path.append(os.getcwd())
    try:
        function = Recognised(resolve_reward(spec), spec)
    except UserError as error:
        answers.send(IMPORT, asdict(Outcome(mistake=str(error))))
        return
    answers.send(IMPORT, asdict(Outcome()))
    while True:
        try:
            number, responses = answers.receive()
        except EOFError:
            return
        start = time.perf_counter()
        outcome = call(function, responses)
        outcome = replace(outcome, seconds=time.perf_counter() - start)
        if too_long := answers.send(number, asdict(outcome)):
            failure = Failure(Cause.WRONG_RESULT, f"returned {too_long:,} bytes of measurements")
            answers.send(number, asdict(Outcome(failure=failure, seconds=outcome.seconds)))


def _limit_memory(limit: int) -> None:
    """Makes larger allocations raise MemoryError; mapped files do not count."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


def _die_with_caller(file: int) -> None:
    """Waits until the other end of the socket is closed, then kills this process group."""
    closed = select.poll()
    closed.register(file, 0)
    closed.poll()
    os.killpg(0, signal.SIGKILL)  # children too


def call(
    function: Callable[[Sequence[Response]], Outcome], responses: Sequence[Response]
) -> Outcome:
    """Returns the function's Outcome, or one for the exception that it raised."""
    try:
        return function(responses)
    except UserError as error:
        return Outcome(mistake=str(error))
    # Code of the user may raise anything, and not every exception can be pickled.
    except BaseException as error:
        return Outcome(failure=failure_of(error))
