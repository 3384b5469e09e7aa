"""The folder of one evaluation: its files, whether one may begin or resume there, and its lock.

Knows files and the options that they were written with. Does not know what an evaluation computes.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from filelock import BaseFileLock

from pat_jax.common.errors import UserError
from pat_jax.common.files import replace_text
from pat_jax.common.hosts.options import DistributedConfig
from pat_jax.common.hosts.together import process_group
from pat_jax.config.command_line import dump
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.evaluation.config import EvaluateConfig
from pat_jax.evaluation.options import RESULTS_FILE
from pat_jax.evaluation.results import EvaluationResults
from pat_jax.run.checkpoints.files import CHECKPOINTS
from pat_jax.run.checkpoints.journal import RolloutJournal
from pat_jax.run.evaluation import Ask
from pat_jax.run.files.folder import CONFIG_FILE, LOG_FILE, is_used, lock_folder, log_to
from pat_jax.run.logging.completions import COMPLETIONS_FILE

POLICY = 0  # which an evaluation has only one of, while its options stay


class EvaluationFolder:
    """Makes and locks the folder of an evaluation, until it is closed or the process ends."""

    def __init__(self, config: EvaluateConfig):
        """Raises UserError if the folder cannot be made or written, if another process evaluates
        there, or if it has files of something else."""
        self._option = f"option --out is {config.out!r}"
        shared = Path(config.out)
        self._lock: BaseFileLock | None = None  # held by the first process, which writes
        process_group().agree("folder of the evaluation", lambda: self._begin(config))
        self.path = process_group().folder(shared)
        self._journal = RolloutJournal(shared, shared / CHECKPOINTS, is_on=True)
        self.kept = self._journal.iteration(0, POLICY).batch(0)
        self.num_tokens = 0  # tokens of the responses that this process generated

    def _begin(self, config: EvaluateConfig) -> None:
        path = Path(config.out)
        self._lock = lock_folder(path, self._option)
        # Another process may have used the folder between reading the options and locking.
        if (path / RESULTS_FILE).exists() or (not config.resume and is_used(path)):
            self._lock.release()
            raise UserError(
                f"{self._option}: another process has evaluated there meanwhile; choose another folder."
            )
        begun = replace(config, resume=False, distributed=DistributedConfig())
        try:
            log_to(path / LOG_FILE)
            replace_text(path / CONFIG_FILE, dump(begun))
            # Left by an earlier start that was killed, or that a reward function ended.
            (path / COMPLETIONS_FILE).unlink(missing_ok=True)
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(
            f"{self._option}: expected a folder that can be written ({error.strerror}); choose another."
        )

    def ask(self, ask: Ask, requests: Sequence[Request]) -> Iterator[tuple[int, Completion]]:
        """Yields indices of requests with completions: first those on disk, then those that `ask`
        generates for the other requests. Each is written to disk before it is yielded."""

        def missing(places: Sequence[int]) -> Iterator[tuple[int, Completion]]:
            for i, done in ask([requests[place] for place in places]):
                self.num_tokens += len(done.tokens)
                yield places[i], done

        return self.kept.completions(requests, missing)

    def finish(self, results: str, told: str = "") -> EvaluationResults:
        """Writes the results, and removes the kept responses, which `completions.jsonl` repeats.
        Returns the results; `told` are they in words."""
        replace_text(self.path / RESULTS_FILE, results)
        self._journal.finish()
        return EvaluationResults(self.path, json.loads(results), told)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kept.iteration.close()
        if self._lock is not None:
            self._lock.release()
