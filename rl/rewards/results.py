"""Turns a reward function's results or exceptions into an `Outcome`.

Accepts numbers and arrays of any library. Imports no jax.
"""

import math
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from pat_jax.common.errors import shown
from pat_jax.rl.rewards.outcome import LARGEST, Cause, Failure, Outcome

_TOO_LARGE = ", more than float32 holds"
_TRACEBACK_LENGTH = 4000
_SCORE = "score"  # the key of the reward in a dict, as in verl
_CALLERS = [str(Path(__file__).with_name(name)) for name in ("process.py", "signatures.py")]


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
    number = _number(score)
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
    found = {str(key): _number(value) for key, value in result.items() if key != _SCORE}
    return {key: x for key, x in found.items() if x is not None and math.isfinite(x)}


def _number(value: object) -> float | None:
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
