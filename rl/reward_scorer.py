"""Scoring the responses of a rollout from the moment they end, while others are still generated.

One response may send a reward function into an endless loop; it must cost that response its
reward, and not end the run. Knows which response is scored next, and which again. Does not know
processes (`reward_workers.py`), what a reward means, nor jax.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import numpy as np

from pat_jax.common.errors import UserError
from pat_jax.rl.built_in_rewards import BUILT_IN
from pat_jax.rl.reward_outcome import Cause, Failure, Outcome, describe_causes
from pat_jax.rl.reward_process import Batch
from pat_jax.rl.reward_workers import RewardWorkers
from pat_jax.rl.rewards import Response

logger = logging.getLogger(__name__)

Ended = TypeVar("Ended")

# String comparisons that cannot hang: sending the texts to a process would cost more than scoring.
_IN_PROCESS = ("exact",)
# Functions known to look at each response alone need not see its group.
_ONE_BY_ONE = tuple(BUILT_IN)
# What no response explains.
_FATAL = (Cause.WRONG_RESULT, Cause.TIMEOUT, Cause.OUT_OF_MEMORY, Cause.CRASHED)
_EXCERPT_LENGTH = 200


class RewardScorer:
    """Scores responses with the reward that `spec` names (`rewards.resolve_reward`).

    Functions of the user see a group at a time (consecutive equal prompts). A group that fails,
    such as by taking longer than `timeout` seconds for each of its responses, is scored again one
    response at a time, each within `timeout`; those that fail then are logged and have no reward.

    Raises UserError if the function cannot be imported or called, or has never scored anything.
    """

    def __init__(self, spec: str, timeout: float, num_workers: int = 1, memory: float = 0.0):
        self.spec, self.timeout = spec, timeout
        self._has_scored = False
        self._told: set[tuple[str, ...]] = set()  # where the function raised
        is_here = spec in _IN_PROCESS
        self._workers = None if is_here else RewardWorkers(spec, num_workers, memory)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="rewards")

    def __enter__(self) -> "RewardScorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes; what is not scored yet never will be."""
        if self._workers is not None:
            self._workers.close()
        self.thread.shutdown(cancel_futures=True)

    def begin(self, prompts: Sequence[str], read: Callable[[Ended], Response]) -> "Scoring[Ended]":
        """Starts the scoring of one response to each of `prompts`, whenever it ends.

        Args:
          read: makes texts of what `Scoring.add` is given; called on a thread, for one at a time.
        """
        if self.spec in _ONE_BY_ONE:
            return Scoring(self, [range(row, row + 1) for row in range(len(prompts))], read)
        return Scoring(self, list(_groups(prompts)), read)

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[object]],
    ) -> np.ndarray:
        """Rewards, float32[responses], in the order of `completions`, which are all there.

        NaN is the reward of one that could not be scored.
        """
        responses = Batch(prompts, completions, columns).responses()
        scoring = self.begin(prompts, _as_it_is)
        for row, response in enumerate(responses):
            scoring.add(row, response)
        return scoring.rewards()

    def submit(self, batch: Batch, seconds: float) -> Future[Outcome]:
        """One call, for at most `seconds`."""
        if self._workers is not None:
            return self._workers.submit(batch, seconds)
        start, here = time.perf_counter(), Future[Outcome]()
        scores = BUILT_IN[self.spec](batch.prompts, batch.completions, **batch.columns)
        here.set_result(Outcome(scores, seconds=time.perf_counter() - start))
        return here

    def try_out(self, responses: Sequence[Response], group_size: int) -> str:
        """Calls the function once, for made-up responses, with the time of a group.

        Returns:
          A line for the user, if it raised or gave no number: real responses may be other ones.

        Raises:
          UserError: it cannot be called, does not return one value a response, hangs or crashes.
        """
        outcome = self.submit(Batch.of(responses), self.timeout * group_size).result()
        if outcome.mistake:
            raise UserError(outcome.mistake)
        scores = [outcome.failure] if outcome.failure else outcome.scores
        failures = [score for score in scores if isinstance(score, Failure)]
        if len(failures) < len(scores):
            return ""
        self._log_traceback(failures[0])
        said = f"reward {self.spec!r} {failures[0].text} when it was tried out on {len(responses)}"
        if failures[0].cause in _FATAL:
            raise UserError(f"{said} made-up responses; correct the function.")
        return f"{said} made-up responses; the run ends if it never scores real ones"

    def report(self, responses: Mapping[int, Response], failures: Mapping[int, Failure]) -> None:
        """Logs which responses could not be scored, of all `responses` of one scoring.

        Raises:
          UserError: none could, nor any before.
        """
        for row, failure in sorted(failures.items()):
            logger.warning(
                "reward %r %s; this response is left out: completion %s, prompt %s",
                self.spec,
                failure.text,
                _excerpt(responses[row].completion),
                _excerpt(responses[row].prompt),
            )
            self._log_traceback(failure)
        self._has_scored |= len(failures) < len(responses)
        if failures and not self._has_scored:
            raise UserError(
                f"reward {self.spec!r} has scored none of {len(responses)} responses "
                f"({describe_causes(failures.values())}); the first time it "
                f"{failures[min(failures)].text}: expected one finite number a response; correct "
                "the function or its columns."
            )

    def _log_traceback(self, failure: Failure) -> None:
        """Once for each place, whatever the messages."""
        lines = failure.traceback.splitlines()
        places = tuple(line for line in lines if line.startswith("  File "))
        if places and places not in self._told:
            self._told.add(places)
            logger.warning("reward %r:\n%s", self.spec, failure.traceback)


class Scoring(Generic[Ended]):
    """The rewards of responses that end one after the other; they do not depend on the order.

    Each call of the function begins when the last of its responses has ended. What is known of the
    responses changes on the scorer's one thread only.
    """

    def __init__(
        self,
        scorer: RewardScorer,
        calls: Sequence[range],
        read: Callable[[Ended], Response],
    ):
        """
        Args:
          calls: which responses the function sees together; each is in one of them.
        """
        self._scorer, self._read = scorer, read
        self._calls = {row: rows for rows in calls for row in rows}
        self._num_expected = self._num_unscored = len(self._calls)
        self._responses: dict[int, Response] = {}
        self.failures: dict[int, Failure] = {}
        self._rewards = np.full(len(self._calls), np.nan, np.float32)
        self._seconds = 0.0  # of reading and scoring so far
        self.hidden_seconds = 0.0  # of that, what was over when `rewards` was called
        self._end: Future[None] = Future()
        if not self._calls:
            self._end.set_result(None)

    def add(self, row: int, ended: Ended) -> None:
        """Response `row` has ended. Returns at once.

        Raises:
          UserError: rewards worked out meanwhile show that the function is wrong for all responses.
        """
        if self._end.done():
            self._end.result()
        self._num_expected -= 1
        self._do(self._take, row, ended)

    def rewards(self) -> np.ndarray:
        """Rewards, float32[responses], as soon as the last one is there; all have been added.

        NaN is the reward of a response that could not be scored; `failures` says why.

        Raises:
          UserError: see `RewardScorer`.
        """
        assert not self._num_expected, f"{self._num_expected} responses have not ended"
        self.hidden_seconds = self._seconds
        self._end.result()
        self._scorer.report(self._responses, self.failures)
        return self._rewards

    def _do(self, step: Callable[..., None], *args: object) -> None:
        try:
            self._scorer.thread.submit(self._guarded, step, *args)
        except RuntimeError as error:  # the scorer is closed
            if not self._end.done():
                self._end.set_exception(error)

    def _guarded(self, step: Callable[..., None], *args: object) -> None:
        if self._end.done():  # by an error: the rewards are of no use
            return
        try:
            step(*args)
        except Exception as error:  # raised where the rewards are asked for
            self._end.set_exception(error)

    def _take(self, row: int, ended: Ended) -> None:
        start = time.perf_counter()
        self._responses[row] = self._read(ended)
        self._seconds += time.perf_counter() - start
        rows = self._calls[row]
        if all(one in self._responses for one in rows):
            self._submit(rows)

    def _submit(self, rows: range) -> None:
        batch = Batch.of([self._responses[row] for row in rows])
        future = self._scorer.submit(batch, self._scorer.timeout * len(batch))
        future.add_done_callback(lambda done: self._do(self._settle, rows, done))

    def _settle(self, rows: range, done: Future[Outcome]) -> None:
        outcome = done.result()
        self._seconds += outcome.seconds
        if outcome.mistake:
            raise UserError(outcome.mistake)
        if outcome.failure and len(rows) > 1:
            for row in rows:
                self._submit(range(row, row + 1))
            return
        for row, score in zip(
            rows, [outcome.failure] if outcome.failure else outcome.scores, strict=True
        ):
            if isinstance(score, Failure):
                self.failures[row] = score
            else:
                self._rewards[row] = score
        self._num_unscored -= len(rows)
        if not self._num_unscored:
            self._end.set_result(None)


def _groups(prompts: Sequence[str]) -> Iterator[range]:
    """Runs of equal prompts: the responses that a function may compare."""
    start = 0
    for _, group in itertools.groupby(prompts):
        stop = start + len(list(group))
        yield range(start, stop)
        start = stop


def _as_it_is(response: Response) -> Response:
    return response


def _excerpt(text: str) -> str:
    if len(text) <= _EXCERPT_LENGTH:
        return repr(text)
    half = _EXCERPT_LENGTH // 2
    return f"{text[:half]!r} … {text[-half:]!r}"
