"""Scoring the responses of a rollout from the moment they end, while others are still generated.

One response may send a reward function into an endless loop; it must cost that response its
reward, and nobody else the run. Knows whose turn it is and who is scored again. Does not know
processes (`reward_workers.py`), what a reward means, nor jax.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import numpy as np

from pat_jax.errors import UserError
from pat_jax.rl.reward_process import Batch, Outcome
from pat_jax.rl.reward_workers import RewardWorkers, outcome_of
from pat_jax.rl.rewards import BUILT_IN, Response

logger = logging.getLogger(__name__)

Ended = TypeVar("Ended")

# String comparisons that cannot hang: sending the texts to a process would cost more than scoring.
_IN_PROCESS = ("exact",)
# Functions known to look at each response alone need not see its group.
_ONE_BY_ONE = ("exact", "math")
_EXCERPT_LENGTH = 200


class RewardScorer:
    """Scores responses with the reward that `spec` names (`rewards.resolve_reward`).

    Functions of the user see a group at a time (consecutive equal prompts). A group that takes
    longer than `timeout` seconds for each of its responses is killed and its responses are scored
    alone, each within `timeout`; those that time out or raise are logged and get 0.

    Raises UserError if the function cannot be imported, returns anything but one finite number a
    response, or has raised for every response of every call so far.
    """

    def __init__(self, spec: str, timeout: float, num_workers: int = 1):
        self.spec, self.timeout = spec, timeout
        self._has_scored = False
        self._workers = None if spec in _IN_PROCESS else RewardWorkers(spec, num_workers)
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
        """Rewards, float32[responses], in the order of `completions`, which are all there."""
        responses = Batch(prompts, completions, columns).responses()
        scoring = self.begin(prompts, _as_it_is)
        for row, response in enumerate(responses):
            scoring.add(row, response)
        return scoring.rewards()

    def submit(self, batch: Batch) -> Future[Outcome]:
        """One call; `outcome_of` reads what comes of it."""
        if self._workers is not None:
            return self._workers.submit(batch, self.timeout * len(batch))
        start, here = time.perf_counter(), Future[Outcome]()
        scores = BUILT_IN[self.spec](batch.prompts, batch.completions, **batch.columns)
        here.set_result(Outcome(scores=tuple(scores), seconds=time.perf_counter() - start))
        return here

    def report(self, responses: Mapping[int, Response], failures: Mapping[int, Outcome]) -> None:
        """Logs which responses could not be scored, of all `responses` of one scoring.

        Raises:
          UserError: none could, nor any before, because the function raises.
        """
        is_broken = len(failures) == len(responses) and all(f.has_raised for f in failures.values())
        if is_broken and failures and not self._has_scored:
            first = failures[min(failures)]
            raise UserError(
                f"reward {self.spec!r} {first.failure} for every response so far: expected one "
                "finite number a response; correct the function or its columns."
            )
        self._has_scored |= len(failures) < len(responses)
        for row in sorted(failures):
            logger.warning(
                "reward %r %s; this response gets 0: completion %s, prompt %s",
                self.spec,
                failures[row].failure,
                _excerpt(responses[row].completion),
                _excerpt(responses[row].prompt),
            )


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
        self._failures: dict[int, Outcome] = {}
        self._rewards = np.zeros(len(self._calls), np.float32)
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

        Raises:
          UserError: see `RewardScorer`.
        """
        assert not self._num_expected, f"{self._num_expected} responses have not ended"
        self.hidden_seconds = self._seconds
        self._end.result()
        self._scorer.report(self._responses, self._failures)
        return self._rewards

    def _do(self, step: Callable[..., None], *args: object) -> None:
        self._scorer.thread.submit(self._guarded, step, *args)

    def _guarded(self, step: Callable[..., None], *args: object) -> None:
        if self._end.done():  # by an error: the rewards are of no use
            return
        try:
            step(*args)
        except Exception as error:  # to whoever asks for the rewards
            self._end.set_exception(error)

    def _take(self, row: int, ended: Ended) -> None:
        start = time.perf_counter()
        self._responses[row] = self._read(ended)
        self._seconds += time.perf_counter() - start
        rows = self._calls[row]
        if all(one in self._responses for one in rows):
            self._submit(rows)

    def _submit(self, rows: range) -> None:
        future = self._scorer.submit(Batch.of([self._responses[row] for row in rows]))
        future.add_done_callback(lambda done: self._do(self._settle, rows, done))

    def _settle(self, rows: range, done: Future[Outcome]) -> None:
        outcome = outcome_of(done, self._scorer.timeout * len(rows))
        self._seconds += outcome.seconds
        if outcome.mistake:
            raise UserError(outcome.mistake)
        if outcome.scores is None and len(rows) > 1:
            for row in rows:
                self._submit(range(row, row + 1))
            return
        if outcome.scores is None:
            self._failures[rows.start] = outcome
        else:
            self._rewards[rows.start : rows.stop] = outcome.scores
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
