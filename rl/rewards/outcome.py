"""The outcome of calling a reward function: scores, or why there are none.

These are plain values that go from one process to another. Imports no jax.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pat_jax.common.printable import printable


class Cause(StrEnum):
    """Why a response has no reward; the names under which failures are counted."""

    TIMEOUT = "timeout"  # killed when its time was over
    EXCEPTION = "exception"  # the function raised
    NONE = "none"  # it returned None for this response
    NOT_A_NUMBER = "not_a_number"  # … or NaN, an infinity, text, more than float32 holds
    WRONG_RESULT = "wrong_result"  # it did not return one value per response
    OUT_OF_MEMORY = "out_of_memory"  # it needed more than a worker may have
    CRASHED = "crashed"  # its process ended
    ENDPOINT = "endpoint"  # the endpoint could not be reached, or was too busy, at every try
    REFUSED = "refused"  # the endpoint answered that the request is wrong
    TOO_LONG = "too_long"  # a reward model reads no text of that length


@dataclass(frozen=True)
class Failure:
    cause: Cause
    text: str  # what the function did, a clause
    traceback: str = ""  # of the user's code, if there is one

    def __post_init__(self) -> None:
        # Both quote output of a function or an endpoint, and are shown on terminals.
        object.__setattr__(self, "text", printable(self.text))
        object.__setattr__(self, "traceback", printable(self.traceback))


@dataclass(frozen=True)
class Outcome:
    """The outcome of one call for some responses."""

    scores: Sequence[float | Failure] = ()  # one per response, unless …
    failure: Failure | None = None  # … the call as a whole failed
    numbers: Sequence[Mapping[str, float]] = ()  # further numbers beside each score, if any
    mistake: str = ""  # why the function cannot be called at all, as a sentence for the user
    seconds: float = 0.0  # time that the function took


def count_causes(failures: Iterable[Failure], prefix: str) -> dict[str, int]:
    """Returns the number of failures of each cause that occurred, as metrics `prefix/cause`."""
    counts = Counter(failure.cause for failure in failures)
    return {f"{prefix}/{cause}": count for cause, count in sorted(counts.items())}


def describe_causes(failures: Iterable[Failure]) -> str:
    """Returns the causes with their counts, such as `3 timeout, 1 exception`."""
    counts = Counter(failure.cause for failure in failures)
    return ", ".join(f"{count} {cause}" for cause, count in counts.most_common())
