"""The outcome of a reward function's call: scores, or the reason why there are none.

These are plain values, which one process sends to another as JSON. Imports no jax.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from pat_jax.common.printable import printable

LARGEST = float(np.finfo(np.float32).max)  # the largest score, since rewards are float32


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
