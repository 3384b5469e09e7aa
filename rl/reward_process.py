"""The process that a reward function runs in: how it starts, and one call after the other.

Knows the function and what it may return. Does not know time limits or retries
(`reward_workers.py`, `reward_scorer.py`); imports no jax.
"""

import asyncio
import inspect
import math
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import numpy as np

from pat_jax.common.errors import UserError
from pat_jax.rl.built_in_rewards import RewardFunction
from pat_jax.rl.reward_outcome import Cause, Failure, Outcome
from pat_jax.rl.rewards import Response, resolve_reward

_LARGEST = float(np.finfo(np.float32).max)
_TOO_LARGE = ", more than float32 holds"
_TRACEBACK_LENGTH = 4000


@dataclass(frozen=True)
class Batch:
    """The arguments of one call."""

    prompts: Sequence[str]
    completions: Sequence[str]
    columns: Mapping[str, Sequence[object]]

    def __post_init__(self):
        for name, values in {"completions": self.completions, **self.columns}.items():
            if len(values) != len(self):
                raise ValueError(f"{len(self)} prompts, but {len(values)} values of {name!r}")

    def __len__(self) -> int:
        return len(self.prompts)

    @classmethod
    def of(cls, responses: Sequence[Response]) -> "Batch":
        """The batch of at least one response; all have the same columns."""
        return cls(
            [response.prompt for response in responses],
            [response.completion for response in responses],
            {name: [one.columns[name] for one in responses] for name in responses[0].columns},
        )

    def responses(self) -> list[Response]:
        return [
            Response(prompt, text, {name: values[i] for name, values in self.columns.items()})
            for i, (prompt, text) in enumerate(zip(self.prompts, self.completions, strict=True))
        ]

    def arguments(self) -> dict[str, list]:
        columns = {name: list(values) for name, values in self.columns.items()}
        return {"prompts": list(self.prompts), "completions": list(self.completions), **columns}


def serve(spec: str, memory: float, calls_file: int, lifeline: int) -> None:
    """Answers each Batch with an Outcome, until there are no more; first says what is wrong, if any.

    Args:
      memory: GiB that this process may have, and each of its children; 0: no limit.
      calls_file: the number of an open file, the other end of the caller's connection.
      lifeline: one that ends when the process does that started this one.
    """
    threading.Thread(target=_die_with, args=(lifeline,), daemon=True).start()
    if memory:
        _limit_memory(int(memory * 2**30))
    os.environ["JAX_PLATFORMS"] = "cpu"  # a reward that uses jax must not touch the accelerator
    sys.path.append(os.getcwd())
    calls = Connection(calls_file)
    try:
        function = resolve_reward(spec)
    except UserError as error:
        calls.send(str(error))
        return
    calls.send("")
    while True:
        try:
            batch = calls.recv()
        except EOFError:
            return
        start = time.perf_counter()
        outcome = call(function, batch, spec)
        calls.send(replace(outcome, seconds=time.perf_counter() - start))


def _limit_memory(limit: int) -> None:
    """Allocating more raises MemoryError. Of what it writes to, not of files that it maps."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


def _die_with(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.killpg(0, signal.SIGKILL)  # children too


def call(function: RewardFunction, batch: Batch, spec: str) -> Outcome:
    """One call, whatever the function may do short of ending or holding up its process."""
    try:
        arguments = bind(function, batch.arguments(), spec)
        scores = function(**arguments)
        if inspect.isawaitable(scores):
            scores = asyncio.run(_wait_for(scores))
        return read_scores(scores, len(batch))
    except UserError as error:
        return Outcome(mistake=str(error))
    except MemoryError as error:
        return Outcome(failure=_failure(Cause.OUT_OF_MEMORY, error))
    # Code of the user may raise anything, and not all of it can be sent to another process.
    except BaseException as error:
        return Outcome(failure=_failure(Cause.EXCEPTION, error))


def bind(function: RewardFunction, arguments: dict[str, list], spec: str) -> dict[str, list]:
    """Those arguments that the function names, or all if it takes any (`**columns`).

    Raises:
      UserError: it needs one that there is not.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # compiled code that does not say
        return arguments
    parameters, wanted = signature.parameters, arguments
    if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        wanted = {name: value for name, value in arguments.items() if name in parameters}
    try:
        signature.bind(**wanted)
    except TypeError as error:
        raise UserError(
            f"reward {spec!r} cannot be called ({error}): expected a function of some of "
            f"{', '.join(arguments)}, or of **columns; correct its arguments or the data's columns."
        ) from error
    return wanted


async def _wait_for(scores: object) -> object:
    return await scores  # pyright: ignore[reportGeneralTypeIssues]


def read_scores(scores: object, count: int) -> Outcome:
    """Takes what a function has returned for `count` responses as it is meant, where it is clear."""
    if hasattr(scores, "tolist"):  # an array of any library
        scores = scores.tolist()  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(scores, Sequence) or isinstance(scores, str):
        return _wrong(f"returned {scores!r:.60}", count)
    if len(scores) != count:
        return _wrong(f"returned {len(scores)} values", count)
    return Outcome(scores=[_number(score) for score in scores])


def _wrong(text: str, count: int) -> Outcome:
    return Outcome(
        failure=Failure(
            Cause.WRONG_RESULT,
            f"{text} where a list of {count} numbers, one a response, was expected",
        )
    )


def _number(score: object) -> float | Failure:
    if score is None:
        return Failure(Cause.NONE, "returned None")
    if hasattr(score, "item"):  # a number of any library
        score = score.item()  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(score, int | float):
        return Failure(Cause.NOT_A_NUMBER, f"returned {score!r:.60}")
    try:
        number = float(score)
    except OverflowError:
        number = math.inf
    if abs(number) <= _LARGEST:
        return number
    too_large = "" if score in (math.inf, -math.inf) or math.isnan(number) else _TOO_LARGE
    return Failure(Cause.NOT_A_NUMBER, f"returned {number:g}{too_large}")


def _failure(cause: Cause, error: BaseException) -> Failure:
    lines = traceback.format_exception_only(error)
    last = next(line for line in lines if not line.startswith(" "))  # no place, no note
    frames = error.__traceback__ and error.__traceback__.tb_next  # without `call`
    text = "".join(traceback.format_exception(type(error), error, frames))
    hint = " (--reward_memory is what it may have)" if cause is Cause.OUT_OF_MEMORY else ""
    return Failure(cause, f"raised {' '.join(last.split()):.300}{hint}", text[-_TRACEBACK_LENGTH:])
