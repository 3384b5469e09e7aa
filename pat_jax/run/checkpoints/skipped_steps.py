"""Optimizer steps skipped for a non-finite gradient: saves their batches, and ends the run after
too many.

Knows batches and files. Does not know what a step is, nor why one has no gradient.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pat_jax.common.errors import UserError
from pat_jax.rl.batches.train_batch import MicroBatch

# Optimizer steps without a finite gradient, or rollouts in which no response has a reward; one more in
# a row ends a run.
MOST_IN_A_ROW = 8
FOLDER = "skipped"  # in the run's folder
_POLICY = "train"

log = logging.getLogger(__name__)


class NonFiniteSteps:
    """The skipped steps of one trained role, in the folder `run`. More than `most` in a row end the
    run; the newest `most` files are kept. The policy has the role `train`."""

    def __init__(self, run: Path, most: int, notify: Callable[[str], None], role: str = _POLICY):
        is_policy = role == _POLICY
        self._folder = run / FOLDER if is_policy else run / FOLDER / role
        self._whose = "" if is_policy else f" of the {role}"
        self._rate = f"--{'optimizer' if is_policy else role}.learning_rate"
        self._most = most
        self._notify = notify
        self._in_a_row = 0

    def note(
        self, step: int, mini_batches: Sequence[Sequence[MicroBatch]], applied: Sequence[bool]
    ) -> None:
        """Counts and saves the skipped optimizer steps of `step` (from 1). `applied` has one entry
        for each of `mini_batches`, repeated for each pass. Raises UserError if too many in a row
        were skipped."""
        skipped = [i for i, is_applied in enumerate(applied) if not is_applied]
        longest = 0
        for is_applied in applied:
            self._in_a_row = 0 if is_applied else self._in_a_row + 1
            longest = max(longest, self._in_a_row)
        if not skipped:
            return
        path = self._folder / f"step-{step}.npz"
        where = self._keep(path, [mini_batches[i % len(mini_batches)] for i in skipped])
        what = f"step {step}: {len(skipped)} of {len(applied)} optimizer steps{self._whose} left out, their gradient not"
        self._notify(f"{what} finite (NaN or infinite){where}")
        if longest > self._most:
            raise UserError(
                f"{longest} optimizer steps{self._whose} in a row had a gradient that is not finite (NaN or "
                f"infinite), the last in step {step}{where}: expected at most {self._most}; "
                f"lower {self._rate}, or resume from an earlier checkpoint."
            )

    def _keep(self, path: Path, mini_batches: Sequence[Sequence[MicroBatch]]) -> str:
        """Saves the mini-batches. Returns a clause on where they are, or "" if saving fails."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            arrays: dict[str, Any] = dict(_arrays(mini_batches))
            # Without allow_pickle: NumPy before 2.2 would write it as one more array.
            np.savez_compressed(path, **arrays)
            files = sorted(path.parent.glob("step-*.npz"), key=lambda one: one.stat().st_mtime_ns)
            for old in files[: -max(1, self._most)]:
                old.unlink()
        except OSError as error:
            log.warning("the batch of step %s is not kept: %s", path.stem, error)
            return ""
        return f"; what they were to learn is in {path}"


def _arrays(mini_batches: Sequence[Sequence[MicroBatch]]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields arrays by names such as `0.1.tokens`: the first mini-batch's second micro-batch."""
    for i, mini in enumerate(mini_batches):
        for j, micro in enumerate(mini):
            rows = {"tokens": micro.tokens, "positions": micro.positions, "weights": micro.weights}
            rows |= {"responses": micro.responses, **micro.columns}
            if micro.teacher is not None:
                rows |= {f"teacher_{name}": values for name, values in vars(micro.teacher).items()}
            yield from ((f"{i}.{j}.{name}", np.asarray(values)) for name, values in rows.items())
