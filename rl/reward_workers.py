"""Scoring responses in processes that can be killed.

One response may send a reward function into an endless loop; it must cost that response its
reward, and nobody else the run. Knows processes and time limits. Does not know what a reward
means, nor jax.
"""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool

import numpy as np
from pebble import ProcessExpired, ProcessPool

from pat_jax.errors import UserError
from pat_jax.rl.reward_process import (
    BareSpawnContext,
    Batch,
    Outcome,
    find_import_mistake,
    score_in_worker,
    start_worker,
)
from pat_jax.rl.rewards import BUILT_IN

logger = logging.getLogger(__name__)

# String comparisons that cannot hang: sending the texts to a process would cost more than scoring.
_IN_PROCESS = ("exact",)
# Functions known to look at each response alone need not see its group.
_ONE_BY_ONE = ("math",)
_IMPORT_SECONDS = 300.0
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
        self.spec = spec
        self.timeout = timeout
        self._has_scored = False
        self._pool: ProcessPool | None = None
        if spec not in _IN_PROCESS:
            self._pool = ProcessPool(
                num_workers, initializer=start_worker, initargs=(spec,), context=BareSpawnContext()
            )
            with contextlib.ExitStack() as on_failure:
                on_failure.callback(self.close)
                self._require_import(self._pool)
                on_failure.pop_all()

    def __enter__(self) -> "RewardScorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[object]],
    ) -> np.ndarray:
        """Rewards, float32[responses], in the order of `completions`."""
        batch = Batch(prompts, completions, columns)
        if self._pool is None:
            scores = BUILT_IN[self.spec](prompts, completions, **columns)
            return np.asarray(scores, np.float32)
        rewards = np.zeros(len(batch), np.float32)
        singles = [range(row, row + 1) for row in range(len(batch))]
        if self.spec in _ONE_BY_ONE:
            failures = self._score_parts(batch, singles, rewards)
        else:
            failed_groups = self._score_parts(batch, list(batch.group_rows()), rewards)
            retries = [singles[row] for rows in failed_groups if len(rows) > 1 for row in rows]
            alone = {rows: outcome for rows, outcome in failed_groups.items() if len(rows) == 1}
            failures = alone | self._score_parts(batch, retries, rewards)
        self._report(batch, failures)
        return rewards

    def _require_import(self, pool: ProcessPool) -> None:
        future = pool.schedule(find_import_mistake)
        try:
            mistake = future.result(timeout=_IMPORT_SECONDS)
        except FutureTimeoutError:
            mistake = (
                f"reward {self.spec!r} did not finish importing in {_IMPORT_SECONDS:g} s: expected "
                "an import without long work; move that work into the function."
            )
        except BrokenProcessPool:
            mistake = (
                f"reward {self.spec!r} ended its process while it was imported: expected a module "
                "that imports; correct it."
            )
        if mistake:
            raise UserError(mistake)

    def _score_parts(
        self, batch: Batch, parts: Sequence[range], rewards: np.ndarray
    ) -> dict[range, Outcome]:
        """Fills in the rewards of the parts that could be scored, and returns the others."""
        assert self._pool is not None
        futures = [
            self._pool.schedule(
                score_in_worker, args=(batch.take(rows),), timeout=self.timeout * len(rows)
            )
            for rows in parts
        ]
        failures = {}
        for rows, future in zip(parts, futures, strict=True):
            outcome = self._wait(future, self.timeout * len(rows))
            if outcome.mistake:
                raise UserError(outcome.mistake)
            if outcome.scores is None:
                failures[rows] = outcome
            else:
                rewards[rows.start : rows.stop] = outcome.scores
        return failures

    def _wait(self, future: Future[Outcome], seconds: float) -> Outcome:
        try:
            return future.result()
        except FutureTimeoutError:
            return Outcome(failure=f"took longer than {seconds:g} s and was killed")
        except ProcessExpired as error:
            return Outcome(failure=f"ended its process with code {error.exitcode}")

    def _report(self, batch: Batch, failures: Mapping[range, Outcome]) -> None:
        is_broken = len(failures) == len(batch) and all(f.has_raised for f in failures.values())
        if is_broken and failures and not self._has_scored:
            first = next(iter(failures.values()))
            raise UserError(
                f"reward {self.spec!r} {first.failure} for every response so far: expected one "
                "finite number a response; correct the function or its columns."
            )
        self._has_scored |= len(failures) < len(batch)
        for rows, outcome in sorted(failures.items(), key=lambda item: item[0].start):
            logger.warning(
                "reward %r %s; this response gets 0: completion %s, prompt %s",
                self.spec,
                outcome.failure,
                _excerpt(batch.completions[rows.start]),
                _excerpt(batch.prompts[rows.start]),
            )


def _excerpt(text: str) -> str:
    if len(text) <= _EXCERPT_LENGTH:
        return repr(text)
    half = _EXCERPT_LENGTH // 2
    return f"{text[:half]!r} … {text[-half:]!r}"
