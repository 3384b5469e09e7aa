"""Scores the responses of a rollout as they finish, while others are still generated.

A response may send a reward function into an endless loop. Then only this response may lose its
reward, and the run must not end. Knows when responses are read and when all are scored. Does not
know how functions are called (`function.py`) or scores add up (`weighted_sum.py`), nor jax.
"""

import contextlib
import time
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from typing import Generic, TypeVar

import numpy as np

from pat_jax.common.errors import UserError
from pat_jax.rl.rewards.function import FunctionScoring, KeptScores, Limits, ScoredFunction
from pat_jax.rl.rewards.model import RewardModel
from pat_jax.rl.rewards.outcome import Failure
from pat_jax.rl.rewards.report import log_failures, never_scored
from pat_jax.rl.rewards.responses import Response
from pat_jax.rl.rewards.rewards import short_names
from pat_jax.rl.rewards.shares import Alone, Shares, own_rows, together
from pat_jax.rl.rewards.weighted_sum import FunctionScores, in_order, weighted_sum

Ended = TypeVar("Ended")
T = TypeVar("T")


class RewardScorer:
    """Scores responses with the rewards that `specs` name (`rewards.resolve_reward`).

    The reward of a response is the weighted sum of the functions' scores (`weighted_sum.py`). A
    response that could not be scored is logged and has no reward.

    Args:
      weights: weight of each function; empty if all are 1.
      timeout: seconds that a function has for a response (`function.py`).
      num_workers, memory, retries, token: limits of each function, see `Limits`.
      shares: the processes that score, each of which must add all responses; None for one process.
      models: the reward models, by the `spec` that names them.

    Raises UserError if a function cannot be imported or called, or no response ever had a reward.
    """

    def __init__(
        self,
        *specs: str,
        weights: Sequence[float] = (),
        timeout: float,
        num_workers: int = 1,
        memory: float = 0.0,
        retries: int = 0,
        token: str = "",
        shares: Shares | None = None,
        models: Mapping[str, RewardModel] | None = None,
    ):
        self.shares = shares or Alone()
        self.models = models or {}
        self._has_scored = False
        limits = Limits(timeout, num_workers, memory, retries, token)
        kinds = zip(specs, short_names(specs), weights or [1.0] * len(specs), strict=True)
        with contextlib.ExitStack() as functions:
            self.functions = [
                functions.enter_context(
                    contextlib.closing(ScoredFunction(spec, name, weight, limits, self.models))
                )
                for spec, name, weight in kinds
            ]
            self._close_functions = functions.pop_all()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="rewards")

    def __enter__(self) -> "RewardScorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes that score. Responses without a score stay without one."""
        self._close_functions.close()
        self.thread.shutdown(cancel_futures=True)

    def begin(
        self,
        prompts: Sequence[str],
        read: Callable[[Ended], Response],
        kept: KeptScores | None = None,
    ) -> "Scoring[Ended]":
        """Begins to score one response to each of `prompts`; see `Scoring.add`.

        Args:
          kept: store of known scores, which are not computed again.
          read: function that makes a `Response` of the object passed to `Scoring.add`; it is called
            on one thread.
        """
        return Scoring(self, prompts, read, kept)

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[object]],
    ) -> np.ndarray:
        """Returns the rewards of finished responses, float32[responses]; NaN for a response that
        could not be scored."""
        for name, values in {"completions": completions, **columns}.items():
            if len(values) != len(prompts):
                raise ValueError(f"{len(prompts)} prompts, but {len(values)} values of {name!r}")
        told: list[Response] = []
        for row, (prompt, text) in enumerate(zip(prompts, completions, strict=True)):
            own = {name: values[row] for name, values in columns.items()}
            told.append(Response(prompt, text, own))
        scoring = self.begin(prompts, told.__getitem__)
        for row in range(len(told)):
            scoring.add(row, row)
        return scoring.rewards()

    def try_out(self, responses: Sequence[Response], group_size: int) -> list[str]:
        """Calls each function once for made-up responses; see `ScoredFunction.try_out`."""
        is_alone = len(self.functions) == 1
        notes = [one.try_out(responses, group_size, is_alone=is_alone) for one in self.functions]
        return [note for note in notes if note]

    def report(
        self,
        responses: Mapping[int, Response],
        scores: Sequence[FunctionScores],
        failures: Mapping[int, Failure],
    ) -> None:
        """Logs the responses that could not be scored (`log_failures`). Raises UserError if no
        response of the run has had a reward."""
        log_failures(responses, scores, failures)
        for function, one in zip(self.functions, scores, strict=True):
            for failure in one.failures:
                function.log_traceback(failure)
        self._has_scored |= len(failures) < len(scores[0].scores)
        if failures and not self._has_scored:
            raise UserError(never_scored(scores, failures))


class Scoring(Generic[Ended]):
    """The rewards of responses that finish one by one; they do not depend on the order.

    The responses' state changes only on the scorer's single thread.
    """

    def __init__(
        self,
        scorer: RewardScorer,
        prompts: Sequence[str],
        read: Callable[[Ended], Response],
        kept: KeptScores | None,
    ):
        self._scorer = scorer
        self._read = read
        self._own = own_rows(prompts, scorer.shares)
        self._parts = [
            FunctionScoring(one, prompts, self._own, self._do, kept) for one in scorer.functions
        ]
        self._num_expected = len(prompts)
        self._responses: dict[int, Response] = {}  # read so far in this process
        self._seconds = 0.0  # seconds spent reading so far
        self.hidden_seconds = 0.0  # seconds of reading and scoring before `rewards` was called
        self.scores: Sequence[FunctionScores] = ()  # scores of each function, once all are known
        self.failures: Mapping[int, Failure] = {}  # reason for each response without a reward
        self._end: Future[None] = Future()
        if self._is_over:
            self._end.set_result(None)

    def add(self, row: int, ended: Ended) -> None:
        """Adds response `row`, which has finished, and returns at once. Raises UserError if earlier
        scores show that a function has a mistake for all responses."""
        if self._end.done():
            self._end.result()
        self._num_expected -= 1
        if row in self._own:
            self._do(self._take, row, ended)

    def rewards(self) -> np.ndarray:
        """Waits for the last reward, and returns all rewards, float32[responses]. All responses
        must have been added. NaN means no reward: `failures` has the reason."""
        assert not self._num_expected, f"{self._num_expected} responses have not ended"
        self.hidden_seconds = self._seconds + sum(part.seconds for part in self._parts)
        self._run_models()
        self._end.result()
        own = [part.by_response for part in self._parts]
        everyone = zip(*self._scorer.shares.gather("rewards", own), strict=True)
        self.scores = [
            in_order(one.spec, one.name, one.weight, dict(ChainMap(*parts)))
            for one, parts in zip(self._scorer.functions, everyone, strict=True)
        ]
        rewards, self.failures = weighted_sum(self.scores)
        failed = {row for one in self.scores for row in one.failed} | self.failures.keys()
        told = {row: self._responses[row] for row in failed & self._own}
        told = together(self._scorer.shares, "responses without a reward", told)
        self._scorer.report(told, self.scores, self.failures)
        return rewards

    def each(self, make: Callable[[Response], T]) -> list[T]:
        """Returns `make(response)` for each response in order; call it after `rewards`."""
        own = {row: make(response) for row, response in self._responses.items()}
        everyone = together(self._scorer.shares, "responses", own)
        return [everyone[row] for row in range(len(everyone))]

    def _run_models(self) -> None:
        if not self._scorer.models:
            return
        self._scorer.thread.submit(int).result()  # responses added before have now been read
        if self._end.done():
            self._end.result()
        for model in self._scorer.models.values():
            model.ask()
        for model in self._scorer.models.values():
            model.score_waiting(self._scorer.shares)

    @property
    def _is_over(self) -> bool:
        return all(part.is_over for part in self._parts)

    def _do(self, step: Callable[..., None], *args: object) -> None:
        try:
            self._scorer.thread.submit(self._guarded, step, *args)
        except RuntimeError as error:  # the scorer is closed
            with contextlib.suppress(InvalidStateError):
                self._end.set_exception(error)

    def _guarded(self, step: Callable[..., None], *args: object) -> None:
        if self._end.done():  # after an error, rewards are not needed
            return
        try:
            step(*args)
        except Exception as error:  # `rewards` raises it
            self._end.set_exception(error)
        else:
            if self._is_over:
                self._end.set_result(None)

    def _take(self, row: int, ended: Ended) -> None:
        start = time.perf_counter()
        self._responses[row] = self._read(ended)
        self._seconds += time.perf_counter() - start
        for part in self._parts:
            part.take(row, self._responses)
