"""The process that a reward function runs in: how it starts, and one call after the other.

Does not know how the function wants to be called (`signatures.py`), nor time limits or retries
(`workers.py`, `scorer.py`); imports no jax.
"""

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from pat_jax.common.errors import UserError
from pat_jax.rl.rewards.channel import IMPORT, Answers
from pat_jax.rl.rewards.outcome import Outcome
from pat_jax.rl.rewards.responses import Response
from pat_jax.rl.rewards.results import failure_of
from pat_jax.rl.rewards.rewards import resolve_reward
from pat_jax.rl.rewards.signatures import Recognised


def serve(spec: str, memory: float, calls_file: int, lifeline: int) -> None:
    """First says what is wrong, if anything is; then answers each call with an Outcome.

    Args:
      memory: GiB that this process may have, and each of its children; 0: no limit.
      calls_file: the number of an open file, the other end of the caller's socket.
      lifeline: one that ends when the process does that started this one.
    """
    answers = Answers(calls_file)
    os.set_inheritable(lifeline, False)
    threading.Thread(target=_die_with, args=(lifeline,), daemon=True).start()
    if memory:
        _limit_memory(int(memory * 2**30))
    os.environ["JAX_PLATFORMS"] = "cpu"  # a reward that uses jax must not touch the accelerator
    sys.path.append(os.getcwd())
    try:
        function = Recognised(resolve_reward(spec), spec)
    except UserError as error:
        answers.send(IMPORT, Outcome(mistake=str(error)))
        return
    answers.send(IMPORT, Outcome())
    while True:
        try:
            number, responses = answers.receive()
        except EOFError:
            return
        start = time.perf_counter()
        outcome = call(function, responses)
        answers.send(number, replace(outcome, seconds=time.perf_counter() - start))


def _limit_memory(limit: int) -> None:
    """Allocating more raises MemoryError. Of what it writes to, not of files that it maps."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


def _die_with(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.killpg(0, signal.SIGKILL)  # children too


def call(
    function: Callable[[Sequence[Response]], Outcome], responses: Sequence[Response]
) -> Outcome:
    """One call, whatever the function may do short of ending or holding up its process."""
    try:
        return function(responses)
    except UserError as error:
        return Outcome(mistake=str(error))
    # Code of the user may raise anything, and not all of it can be sent to another process.
    except BaseException as error:
        return Outcome(failure=failure_of(error))
