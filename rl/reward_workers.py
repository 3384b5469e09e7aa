"""Processes that score responses and that can be killed.

Knows processes and time limits. Does not know which response is scored when, or again
(`reward_scorer.py`), what a reward means, nor jax.
"""

import contextlib
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool

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

_IMPORT_SECONDS = 300.0


class RewardWorkers:
    """Runs the function that `spec` names (`rewards.resolve_reward`), each call within its limit.

    Raises UserError if the function cannot be imported.
    """

    def __init__(self, spec: str, num_workers: int):
        self.spec = spec
        self._pool = ProcessPool(
            num_workers, initializer=start_worker, initargs=(spec,), context=BareSpawnContext()
        )
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            self._require_import()
            on_failure.pop_all()

    def close(self) -> None:
        """Kills the processes, whatever they are at: what has not been scored never will be."""
        self._pool.stop()
        self._pool.join()

    def submit(self, batch: Batch, seconds: float) -> Future[Outcome]:
        """One call, killed when it has run for `seconds`; `outcome_of` reads what comes of it."""
        return self._pool.schedule(score_in_worker, args=(batch,), timeout=seconds)

    def _require_import(self) -> None:
        future = self._pool.schedule(find_import_mistake)
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


def outcome_of(future: Future[Outcome], seconds: float) -> Outcome:
    """What came of a call that is over, or was killed after `seconds`."""
    try:
        return future.result()
    except FutureTimeoutError:
        return Outcome(failure=f"took longer than {seconds:g} s and was killed", seconds=seconds)
    except ProcessExpired as error:
        return Outcome(failure=f"ended its process with code {error.exitcode}")
