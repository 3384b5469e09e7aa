"""The folder of one evaluation: its files, whether one may begin or resume there, and its lock.

Knows files and the options that they were written with. Does not know what an evaluation computes.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from filelock import BaseFileLock

from pat_jax.common.errors import UserError
from pat_jax.common.files import PatientFile, replace_text, whole_lines
from pat_jax.common.hosts.options import DistributedConfig
from pat_jax.common.hosts.together import process_group
from pat_jax.common.json_text import parse_json
from pat_jax.config.command_line import dump
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.evaluation.config import EvaluateConfig
from pat_jax.evaluation.options import RESPONSES_FILE, RESULTS_FILE
from pat_jax.evaluation.results import EvaluationResults
from pat_jax.run.checkpoints.journal import response_row
from pat_jax.run.evaluation import Ask
from pat_jax.run.files.folder import CONFIG_FILE, LOG_FILE, is_used, lock_folder, log_to
from pat_jax.run.logging.completions import COMPLETIONS_FILE


class KeptResponses:
    """A file with a line for each response, in the order in which they end."""

    def __init__(self, path: Path):
        """Raises UserError if the file has a line that is not a response, and OSError if it cannot
        be written."""
        self.path = path
        self._file: PatientFile | None = None  # open in the first process only
        # For each request's index: its line in the file, its checksum, its completion.
        self._kept = process_group().agree("responses before", self._open)
        self.num_tokens = 0  # tokens of the responses that this process generated

    def _open(self) -> dict[int, tuple[int, int, Completion]]:
        whole = whole_lines(self.path)
        kept = dict(self._read(i, x) for i, x in enumerate(whole.splitlines(), start=1))
        self._file = PatientFile(self.path)
        os.truncate(self.path, len(whole))
        return kept

    def __len__(self) -> int:
        return len(self._kept)

    def ask(self, ask: Ask, requests: Sequence[Request]) -> Iterator[tuple[int, Completion]]:
        """Yields indices of requests with completions: first those on disk, then those that `ask`
        generates for the other requests. Each is written to disk before it is yielded. Raises
        UserError if responses on disk are of other requests."""
        for place, (line, checksum, done) in self._kept.items():
            if place >= len(requests) or requests[place].checksum != checksum:
                raise UserError(
                    f"{self.path}, line {line}, is the response to another problem than is asked now: "
                    "expected the files of --data, and the tokenizer of the model, as they were; put "
                    "them back, or choose another --out."
                )
            yield place, done
        left = [place for place in range(len(requests)) if place not in self._kept]
        for i, done in ask([requests[place] for place in left]):
            self._write(left[i], requests[left[i]], done)
            yield left[i], done

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, place: int, request: Request, done: Completion) -> None:
        self.num_tokens += len(done.tokens)
        if self._file is not None:
            self._file.write_row({"place": place, **response_row(request, done)})

    def _read(self, number: int, line: bytes) -> tuple[int, tuple[int, int, Completion]]:
        try:
            row: Any = parse_json(line)
            tokens = np.array(row["tokens"], np.int32)
            is_truncated = bool(row["truncated"])
            place, checksum = int(row["place"]), int(row["request"])
            if tokens.ndim != 1 or place < 0:
                raise ValueError
        except (ValueError, TypeError, KeyError, OverflowError):
            raise UserError(
                f"{self.path}, line {number}, is no response of an evaluation: expected an object with "
                "place, request, tokens and truncated; choose another --out."
            ) from None
        # NaN: the file has no log-probabilities, and an evaluation uses none.
        nothing = np.full(len(tokens), np.nan, np.float32)
        return place, (number, checksum, Completion(tokens, nothing, is_truncated))


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
        try:
            self.responses = KeptResponses(shared / RESPONSES_FILE)
        except OSError as error:
            raise self._unwritable(error) from None

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

    def finish(self, results: str, told: str = "") -> EvaluationResults:
        """Writes the results, and removes the kept responses, which `completions.jsonl` repeats.
        Returns the results; `told` are they in words."""
        replace_text(self.path / RESULTS_FILE, results)
        if process_group().is_first:
            self.responses.path.unlink()
        return EvaluationResults(self.path, json.loads(results), told)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.responses.close()
        if self._lock is not None:
            self._lock.release()
