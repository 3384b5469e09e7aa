"""Scores the responses of a rollout with one reward function, as they finish.

A response that fails must not take other responses' scores. Knows what computes a reward (this
process, worker processes, an endpoint, or a model), which responses one call is for, and which are
scored again. Does not know processes (`workers.py`), nor other functions.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from pat_jax.common.errors import UserError
from pat_jax.rl.rewards.built_in import BUILT_IN, NONE
from pat_jax.rl.rewards.endpoint import RewardEndpoint
from pat_jax.rl.rewards.model import RewardModel
from pat_jax.rl.rewards.outcome import Cause, Failure, Outcome
from pat_jax.rl.rewards.responses import Response
from pat_jax.rl.rewards.rewards import is_endpoint, model_of
from pat_jax.rl.rewards.shares import groups_of
from pat_jax.rl.rewards.signatures import Recognised
from pat_jax.rl.rewards.weighted_sum import Score
from pat_jax.rl.rewards.workers import RewardWorkers

# Functions that only compare strings and cannot hang: a worker would cost more than they do.
_IN_PROCESS = ("exact", NONE)
logger = logging.getLogger(__name__)
# Exceptions that a mistake in the function's code causes, not a response.
_MISTAKES = "NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError"
_FATAL = frozenset(Cause) - {
    *(Cause.EXCEPTION, Cause.NONE, Cause.NOT_A_NUMBER, Cause.TOO_LONG),
}


@dataclass(frozen=True)
class Limits:
    """Limits on the calls of each reward function."""

    timeout: float  # seconds per response; a call may take their sum over its responses
    num_workers: int = 1  # largest number of calls at a time
    memory: float = 0.0  # GiB of each process; 0: no limit
    retries: int = 0  # further tries of a failed call to an endpoint
    token: str = field(default="", repr=False)  # authorization token sent to endpoints


def open_caller(spec: str, limits: Limits, models: Mapping[str, RewardModel]) -> "Caller":
    """Returns the caller of the reward `spec`: one of `models` if `spec` names a model. Raises
    UserError if the function cannot be imported, or if an address is not valid."""
    if model_of(spec):
        return models[spec]
    if spec in _IN_PROCESS:
        return _InProcess(spec)
    if is_endpoint(spec):
        return RewardEndpoint(spec, limits.num_workers, limits.retries, limits.token)
    return RewardWorkers(spec, limits.num_workers, limits.memory)


class _InProcess:
    """Calls a built-in function in this process."""

    def __init__(self, spec: str):
        self._function = Recognised(BUILT_IN[spec], spec)

    def submit(self, responses: Sequence[Response], seconds: float) -> Future[Outcome]:
        del seconds
        start = time.perf_counter()
        here = Future[Outcome]()
        outcome = self._function(responses)
        here.set_result(replace(outcome, seconds=time.perf_counter() - start))
        return here

    def close(self) -> None:
        """Does nothing, since there is no process to end."""


Caller = RewardModel | RewardEndpoint | RewardWorkers | _InProcess


class ScoredFunction:
    """Calls the function that `spec` names (`rewards.resolve_reward`), or the endpoint or model.

    A call of a user's function is for one group at a time (consecutive equal prompts).

    Args:
      models: the reward models, by the `spec` that names them.

    Raises UserError if the function cannot be imported, or `spec` is not a valid address.
    """

    def __init__(
        self,
        spec: str,
        name: str,
        weight: float,
        limits: Limits,
        models: Mapping[str, RewardModel],
    ):
        self.spec = spec
        self.name = name
        self.weight = weight
        self._timeout = limits.timeout
        self._told: set[tuple[str, ...]] = set()  # code lines of tracebacks that were logged
        self._caller = open_caller(spec, limits, models)

    def close(self) -> None:
        self._caller.close()

    def submit(self, responses: Sequence[Response]) -> Future[Outcome]:
        """Starts one call for these responses."""
        return self._caller.submit(responses, self._timeout * len(responses))

    def calls(self, prompts: Sequence[str]) -> list[range]:
        """Returns the indices of the responses of each call; each response is in one call."""
        # Built-in functions and models score each response alone.
        if self.spec in BUILT_IN or isinstance(self._caller, RewardModel):
            return [range(row, row + 1) for row in range(len(prompts))]
        return list(groups_of(prompts))

    def try_out(self, responses: Sequence[Response], group_size: int, *, is_alone: bool) -> str:
        """Calls the function once, for made-up responses, with the time limit of a group. Returns a
        warning if it raised or returned no number: it may still score real responses. None counts
        as no number only if there are no other functions (`is_alone`). Raises UserError if the
        function cannot be called, does not return one value per response, hangs or crashes."""
        outcome = self._tried(responses, self._timeout * group_size)
        if outcome.mistake:
            raise UserError(outcome.mistake)
        scores = [outcome.failure] if outcome.failure else outcome.scores
        failures = [score for score in scores if isinstance(score, Failure)]
        if not is_alone:
            failures = [failure for failure in failures if failure.cause is not Cause.NONE]
        if len(failures) < len(scores):
            return ""
        first = failures[0]
        self.log_traceback(first)
        tried = f"when it was tried out on {len(responses)} made-up responses"
        sentence = f"reward {self.spec!r} {first.text} {tried}"
        if first.cause in _FATAL or _is_mistake(first):
            is_asked = is_endpoint(self.spec)
            what = "start the endpoint or correct it" if is_asked else "correct the function"
            raise UserError(f"{sentence}; {what}.")
        return f"{sentence}; the run ends if it never scores real ones"

    def _tried(self, responses: Sequence[Response], seconds: float) -> Outcome:
        if isinstance(self._caller, RewardModel):  # its programs are not compiled yet
            return self._caller.try_out(responses)
        return self._caller.submit(responses, seconds).result()

    def log_traceback(self, failure: Failure) -> None:
        """Logs a failure's traceback, once for each place in the code, even if messages differ."""
        lines = failure.traceback.splitlines()
        places = tuple(line for line in lines if line.startswith("  File "))
        if places and places not in self._told:
            self._told.add(places)
            logger.warning("reward %r:\n%s", self.spec, failure.traceback)


def _is_mistake(failure: Failure) -> bool:
    last = failure.traceback.rstrip().rpartition("\n")[2]
    return failure.cause is Cause.EXCEPTION and last.partition(":")[0] in _MISTAKES


@runtime_checkable
class KeptScores(Protocol):
    """A store of scores that outlives the process."""

    @property
    def scores(self) -> Mapping[int, Mapping[str, Score]]:
        """Stored scores, by the index of the response and by function. Those of a response are all
        available before it finishes."""
        ...

    def keep(self, place: int, function: str, score: Score) -> None: ...


class FunctionScoring:
    """Collects the scores of one function for responses that finish one by one. Scores do not
    depend on the order.

    A call begins when the last of its responses has finished. If a call fails, for example by
    taking too long, it is repeated for each of its responses alone, unless an endpoint is down.
    All methods run on one thread.
    """

    def __init__(
        self,
        function: ScoredFunction,
        prompts: Sequence[str],
        own: Collection[int],
        do: Callable[..., None],
        kept: KeptScores | None,
    ):
        """
        Args:
          own: indices of the responses to score, in whole groups.
          do: function that calls a method with arguments on that thread.
          kept: store of known scores, which are not computed again; new ones are added to it.
        """
        self._function = function
        self._do = do
        self._kept = kept
        calls = [rows for rows in function.calls(prompts) if rows.start in own]
        self._calls = {row: rows for rows in calls for row in rows}
        self.by_response: dict[int, Score] = {}  # scores so far, by the response's index
        self.seconds = 0.0  # seconds spent scoring so far

    @property
    def is_over(self) -> bool:
        return len(self.by_response) == len(self._calls)

    def take(self, row: int, responses: Mapping[int, Response]) -> None:
        """Takes response `row`, which has finished, if this process is to score it.

        Args:
          responses: all finished responses.
        """
        rows = self._calls.get(row, range(0))
        name = self._function.name
        if not rows or not all(one in responses for one in rows):
            return
        kept = {} if self._kept is None else self._kept.scores
        known = {one: kept[one][name] for one in rows if name in kept.get(one, {})}
        if len(known) == len(rows):
            self.by_response |= known
        else:
            self._submit(rows, responses)

    def _submit(self, rows: range, responses: Mapping[int, Response]) -> None:
        future = self._function.submit([responses[row] for row in rows])
        future.add_done_callback(lambda done: self._do(self._settle, rows, responses, done))

    def _settle(
        self, rows: range, responses: Mapping[int, Response], done: Future[Outcome]
    ) -> None:
        outcome = done.result()
        self.seconds += outcome.seconds
        if outcome.mistake:
            raise UserError(outcome.mistake)
        is_down = outcome.failure is not None and outcome.failure.cause is Cause.ENDPOINT
        if outcome.failure and not is_down and len(rows) > 1:
            for row in rows:
                self._submit(range(row, row + 1), responses)
            return
        scores = [outcome.failure] * len(rows) if outcome.failure else outcome.scores
        numbers = outcome.numbers or [{}] * len(rows)
        found = dict(zip(rows, zip(scores, numbers, strict=True), strict=True))
        self.by_response |= found
        if self._kept is not None:
            for row, score in found.items():
                self._kept.keep(row, self._function.name, score)
