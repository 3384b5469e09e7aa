"""The outcome of a reward function's call: scores, or the reason why there are none.

It is made of the function's results, numbers and arrays of any library, or of its exception.
Outcomes are plain values, which one process sends to another as JSON. Imports no jax.
"""

import math
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from pat_jax.common.errors import printable, shown

LARGEST = float(np.finfo(np.float32).max)  # the largest score, since rewards are float32
_TOO_LARGE = ", more than float32 holds"
_TRACEBACK_LENGTH = 4000
_SCORE = "score"  # the key of the reward in a dict, as in verl
_CALLERS = [str(Path(__file__).with_name(name)) for name in ("process.py", "signatures.py")]


class Cause(StrEnum):
    """Why a response has no reward. Failures are counted under these names."""

    TIMEOUT = "timeout"  # the call was ended when its time was over
    EXCEPTION = "exception"  # the function raised
    NONE = "none"  # it returned None for this response
    NOT_A_NUMBER = "not_a_number"  # it returned NaN, infinity, a text, or more than float32 holds
    WRONG_RESULT = "wrong_result"  # it did not return one value per response
    OUT_OF_MEMORY = "out_of_memory"  # it needed more than a worker may have
    CRASHED = "crashed"  # its process ended
    ENDPOINT = "endpoint"  # the endpoint could not be reached, or was too busy, at every try
    REFUSED = "refused"  # the endpoint answered that the request is wrong
    TOO_LONG = "too_long"  # a reward model reads no text of that length


@dataclass(frozen=True)
class Failure:
    cause: Cause
    text: str  # a clause that tells what the function did
    traceback: str = ""  # traceback of the user's code, if there is one

    def __post_init__(self) -> None:
        # Both quote output of a function or an endpoint, and are shown on terminals.
        object.__setattr__(self, "text", printable(self.text))
        object.__setattr__(self, "traceback", printable(self.traceback))


@dataclass(frozen=True)
class Outcome:
    """The outcome of one call for some responses."""

    scores: Sequence[float | Failure] = ()  # one per response; empty if `failure` is given
    failure: Failure | None = None  # why the call as a whole failed
    numbers: Sequence[Mapping[str, float]] = ()  # further numbers for each response, if any
    mistake: str = ""  # why the function cannot be called at all, as a sentence for the user
    seconds: float = 0.0  # seconds that the function took

    @classmethod
    def of_json(cls, answer: Mapping[str, Any], count: int) -> "Outcome":
        """Returns the outcome for `count` responses that `asdict` and JSON have written. Raises
        ValueError, TypeError, KeyError, OverflowError or AttributeError for an invalid `answer`."""
        failure = answer["failure"]
        outcome = cls(
            scores=[_score(score) for score in answer["scores"]],
            failure=None if failure is None else _failure(failure),
            numbers=[{key: _number(x) for key, x in one.items()} for one in answer["numbers"]],
            mistake=_text(answer["mistake"]),
            seconds=_number(answer["seconds"]),
        )
        wanted = 0 if outcome.failure or outcome.mistake else count
        if len(outcome.scores) != wanted or len(outcome.numbers) not in (0, wanted):
            raise ValueError
        return outcome


def count_causes(failures: Iterable[Failure], prefix: str) -> dict[str, int]:
    """Returns the number of failures of each cause that occurred, as metrics `prefix/cause`."""
    counts = Counter(failure.cause for failure in failures)
    return {f"{prefix}/{cause}": count for cause, count in sorted(counts.items())}


def describe_causes(failures: Iterable[Failure]) -> str:
    """Returns the causes with their counts, such as `3 timeout, 1 exception`."""
    counts = Counter(failure.cause for failure in failures)
    return ", ".join(f"{count} {cause}" for cause, count in counts.most_common())


def _score(value: object) -> float | Failure:
    if not isinstance(value, int | float):
        return _failure(value)
    if abs(value) > LARGEST:  # the process would have sent a failure
        raise ValueError
    return _number(value)


def _failure(value: Any) -> Failure:
    return Failure(Cause(value["cause"]), _text(value["text"]), _text(value["traceback"]))


def _number(value: Any) -> float:
    number = float(value)
    if not abs(number) <= sys.float_info.max:
        raise ValueError
    return number


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def read_scores(scores: object, count: int) -> Outcome:
    """Returns the outcome for a function's result `scores` for `count` responses together."""
    if hasattr(scores, "tolist"):  # an array of any library
        scores = scores.tolist()  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(scores, Sequence) or isinstance(scores, str):
        return _wrong(f"returned {shown(scores):.60}", count)
    if len(scores) != count:
        return _wrong(f"returned {len(scores)} values", count)
    return Outcome(scores=[read_score(score) for score in scores])


def read_results(results: Iterable[object]) -> Outcome:
    """Returns the outcome for a function's results, or exceptions, for each response alone.

    A result is a number, or a dict as in verl: `score` is the reward, and the other numbers become
    the outcome's `numbers`."""
    scores: list[float | Failure] = []
    numbers: list[Mapping[str, float]] = []
    for result in results:
        found: Mapping = result if isinstance(result, Mapping) and _SCORE in result else {}
        scores.append(read_score(found[_SCORE] if found else result))
        numbers.append(_others(found))
    return Outcome(scores=scores, numbers=numbers)


def read_score(score: object) -> float | Failure:
    if isinstance(score, BaseException):
        return failure_of(score)
    if score is None:
        return Failure(Cause.NONE, "returned None")
    number = _as_number(score)
    if number is None:
        return Failure(Cause.NOT_A_NUMBER, f"returned {shown(score):.60}")
    if abs(number) <= LARGEST:
        return number
    too_large = "" if score in (math.inf, -math.inf) or math.isnan(number) else _TOO_LARGE
    return Failure(Cause.NOT_A_NUMBER, f"returned {number:g}{too_large}")


def failure_of(error: BaseException) -> Failure:
    """Returns the failure for an exception, with the traceback of the user's code."""
    cause = Cause.OUT_OF_MEMORY if isinstance(error, MemoryError) else Cause.EXCEPTION
    lines = traceback.format_exception_only(error)
    last = next(line for line in lines if not line.startswith(" "))  # without code lines
    text = "".join(traceback.format_exception(type(error), error, _users(error.__traceback__)))
    hint = " (--reward_memory is what it may have)" if cause is Cause.OUT_OF_MEMORY else ""
    return Failure(cause, f"raised {' '.join(last.split()):.300}{hint}", text[-_TRACEBACK_LENGTH:])


def _users(frames: TracebackType | None) -> TracebackType | None:
    """Returns the frames after this project's last one: those of the user's code."""
    users = frames
    while frames:
        frames, is_ours = frames.tb_next, frames.tb_frame.f_code.co_filename in _CALLERS
        users = frames if is_ours else users
    return users


def _others(result: Mapping) -> dict[str, float]:
    """Returns the finite numbers of a result other than its score, by name."""
    found = {str(key): _as_number(value) for key, value in result.items() if key != _SCORE}
    return {key: x for key, x in found.items() if x is not None and math.isfinite(x)}


def _as_number(value: object) -> float | None:
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:  # a number of any library
        value = value.item()  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _wrong(text: str, count: int) -> Outcome:
    what = f"{text} where a list of {count} numbers, one a response, was expected"
    return Outcome(failure=Failure(Cause.WRONG_RESULT, what))
