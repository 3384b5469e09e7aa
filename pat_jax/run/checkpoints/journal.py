"""Keeps responses and their scores on disk until a checkpoint covers their iteration, or until an
evaluation has its results.

A run that is resumed after a kill reads them instead of generating them again. A response is reused
if its request is the same and the policy has the same bits. Knows requests, scores and files. Does
not know what generates, nor what scores.
"""

import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pat_jax.common.files import PatientFile, whole_lines
from pat_jax.common.hosts import wire
from pat_jax.common.hosts.together import process_group
from pat_jax.common.json_text import parse_json
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.rl.rewards.outcome import Cause, Failure
from pat_jax.rl.rewards.weighted_sum import FunctionScores, Score
from pat_jax.run.checkpoints.files import JOURNAL, checkpoints_in

log = logging.getLogger(__name__)
Ask = Callable[[Sequence[int]], Iterator[tuple[int, Completion]]]
Scores = dict[str, Score]  # of a response, by function


@dataclass(frozen=True)
class SavedResponse:
    """One response, as read from disk."""

    request: int  # checksum of the request
    completion: Completion
    scores: Scores


class RolloutJournal:
    """The journal of one run. Unless it `is_on`, nothing is written or read."""

    def __init__(self, run: Path, checkpoints: Path, *, is_on: bool):
        self._folder = run / JOURNAL  # with a file for each iteration
        self._checkpoints = checkpoints
        self._is_on = is_on

    def iteration(self, step: int, policy: int) -> "Iteration":
        """Opens the journal of the iteration after `step` others. `policy` is the checksum of the
        policy that generates its responses."""
        if not self._is_on:
            return Iteration(policy)
        opened: list[PatientFile] = []  # empty in all processes but the first
        path = self._folder / f"iteration-{step}.jsonl"
        before = process_group().agree(
            "unfinished responses", lambda: self._open(path, policy, opened)
        )
        return Iteration(policy, before, opened[0] if opened else None)

    def finish(self) -> None:
        """Deletes the journal: the last checkpoint covers all iterations."""
        if self._is_on and process_group().is_first:
            self._forget()
            if self._folder.is_dir():
                self._folder.rmdir()

    def _open(
        self, path: Path, policy: int, opened: list[PatientFile]
    ) -> dict[tuple[int, int], SavedResponse]:
        try:
            self._folder.mkdir(exist_ok=True)
            saved = [int(one.name) for one in checkpoints_in(self._checkpoints)]
            self._forget(max(saved, default=0))
            whole = whole_lines(path)
            opened.append(PatientFile(path))
            os.truncate(path, len(whole))
        except OSError as error:  # a run can do without it
            log.warning("responses of unfinished iterations are not kept: %s", error)
            return {}
        return _read(whole.splitlines(), policy)

    def _forget(self, before: float = math.inf) -> None:
        """Deletes the files of iterations below `before`."""
        for path in self._folder.glob("iteration-*.jsonl"):
            step = path.stem.partition("-")[2]
            if step.isdigit() and int(step) < before:
                path.unlink()


@dataclass
class Iteration:
    """The journal of one iteration, which may draw several batches."""

    policy: int
    before: dict[tuple[int, int], SavedResponse] = field(default_factory=dict)
    _file: PatientFile | None = None
    _writes: threading.Lock = field(default_factory=threading.Lock)  # scores come from a thread

    def batch(self, number: int) -> "Batch":
        before = {place: one for (batch, place), one in self.before.items() if batch == number}
        return Batch(number, self, before)

    def write(self, row: dict[str, Any]) -> None:
        if self._file is not None:
            with self._writes:
                self._file.write_row(row)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        if self._file is not None:
            with self._writes:
                self._file.close()
                self._file = None


@dataclass
class Batch:
    """The journal of the responses to one batch of prompts."""

    number: int
    iteration: Iteration
    before: dict[int, SavedResponse]  # by the index of the request
    scores: dict[int, Scores] = field(default_factory=dict)  # of responses from the disk
    taken: int = 0  # number of responses from the disk
    # Scores that are written already: index of the request, and function.
    _kept: set[tuple[int, str]] = field(default_factory=set)

    def completions(
        self, requests: Sequence[Request], ask: Ask
    ) -> Iterator[tuple[int, Completion]]:
        """Yields the index of each request with its completion: first those on disk, then those
        that `ask` generates for the others. Each is written to disk before it is yielded."""
        left = []
        for place, request in enumerate(requests):
            earlier = self.before.get(place)
            if earlier is None or earlier.request != request.checksum:
                left.append(place)
                continue
            self.taken += 1
            self.scores[place] = earlier.scores
            self._kept |= {(place, function) for function in earlier.scores}
            yield place, earlier.completion
        if left:
            for place, done in ask(left):
                self._write(place, requests[place], done)
                yield place, done

    def keep(self, place: int, function: str, score: Score) -> None:
        """Writes the score that a function gave. A failure is not written: a retry may succeed."""
        value, numbers = score
        if isinstance(value, Failure):
            if value.cause is not Cause.NONE:
                return
            value = None
        if (place, function) not in self._kept:
            self._kept.add((place, function))
            row = {"function": function, "score": value, "numbers": dict(numbers)}
            self._write_row(place, row)

    def keep_all(self, functions: Sequence[FunctionScores]) -> None:
        """Writes all scores, including those that other processes computed."""
        for one in functions:
            for place, score in enumerate(one.pairs):
                self.keep(place, one.name, score)

    def _write(self, place: int, request: Request, done: Completion) -> None:
        row = {"policy": self.iteration.policy, "request": request.checksum}
        self._write_row(place, row | {"completion": wire.to_bytes(done).decode()})

    def _write_row(self, place: int, row: dict[str, Any]) -> None:
        self.iteration.write({"batch": self.number, "place": place} | row)


def _completion(row: dict[str, Any]) -> Completion:
    done = wire.of_bytes(row["completion"].encode())
    if not isinstance(done, Completion):
        raise TypeError(f"a {type(done).__name__} is no completion")
    return done


def _read(lines: Sequence[bytes], policy: int) -> dict[tuple[int, int], SavedResponse]:
    """Returns the responses of this policy with their scores, by batch and index of the request.
    Lines of other policies are left out."""
    found: dict[tuple[int, int], SavedResponse] = {}
    for line in lines:
        try:
            row: Any = parse_json(line)
            at = int(row["batch"]), int(row["place"])
            if "function" not in row:
                found.pop(at, None)  # drawn anew since
                if row["policy"] == policy:
                    found[at] = SavedResponse(int(row["request"]), _completion(row), {})
            elif at in found:
                found[at].scores[row["function"]] = _score(row)
        except (*wire.UNREADABLE, OverflowError) as error:
            log.warning("a line of an unfinished iteration is left out: %r", error)
    return found


def _score(row: dict[str, Any]) -> Score:
    value = row["score"]
    numbers = {str(k): float(x) for k, x in row["numbers"].items()}
    if value is None:
        return Failure(Cause.NONE, "returned None"), numbers
    return float(value), numbers
