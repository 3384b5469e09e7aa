"""The responses of iterations that no checkpoint covers yet, on disk as they end, with their
scores.

A run that goes on after a kill generates none of them again. One is taken from the disk if the
request is the same, and the policy that would answer it is the same bit for bit. Knows requests,
scores and files. Does not know what generates, nor what scores.
"""

import base64
import json
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from pat_jax.common.files import PatientFile, whole_lines
from pat_jax.common.hosts.together import process_group
from pat_jax.common.json_text import parse_json
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.rl.rewards.outcome import Cause, Failure
from pat_jax.rl.rewards.weighted_sum import FunctionScores, Score
from pat_jax.run.checkpoints.files import checkpoints_in

FOLDER = "unfinished"  # in that of the run, with a file for each iteration

ROUTES = "<i2"  # how the numbers of experts are written
log = logging.getLogger(__name__)
Ask = Callable[[Sequence[int]], Iterator[tuple[int, Completion]]]
Scores = dict[str, Score]  # of a response, by function


@dataclass(frozen=True)
class SavedResponse:
    """What is on disk of one response."""

    request: int  # its checksum
    completion: Completion
    scores: Scores


class RolloutJournal:
    """The iterations of one run.

    Args:
      run: its folder.
      checkpoints: the folder of its checkpoints.
      is_on: whether anything is kept, or taken from there.
    """

    def __init__(self, run: Path, checkpoints: Path, *, is_on: bool):
        self._folder, self._checkpoints, self._is_on = run / FOLDER, checkpoints, is_on

    def iteration(self, step: int, policy: int) -> "Iteration":
        """
        Args:
          step: iterations before it.
          policy: checksum of what answers its requests.
        """
        if not self._is_on:
            return Iteration(policy)
        path = self._folder / f"iteration-{step}.jsonl"
        opened: list[PatientFile] = []  # by the first process
        before = process_group().agree(
            "unfinished responses", lambda: self._open(path, policy, opened)
        )
        return Iteration(policy, before, *opened)

    def finish(self) -> None:
        """The last checkpoint is there."""
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
        except OSError as error:  # nothing that a run needs
            log.warning("responses of unfinished iterations are not kept: %s", error)
            return {}
        return _read(whole.splitlines(), policy)

    def _forget(self, before: float = math.inf) -> None:
        """Iterations that come before this one."""
        for path in self._folder.glob("iteration-*.jsonl"):
            step = path.stem.partition("-")[2]
            if step.isdigit() and int(step) < before:
                path.unlink()


class Iteration:
    """The responses of one; its batches are those that it draws."""

    def __init__(
        self,
        policy: int,
        before: dict[tuple[int, int], SavedResponse] | None = None,
        file: PatientFile | None = None,
    ):
        self.policy, self._before, self._file = policy, before or {}, file
        self._writes = threading.Lock()  # scores come from a thread of their own

    def batch(self, number: int) -> "Batch":
        before = {
            place: earlier for (batch, place), earlier in self._before.items() if batch == number
        }
        return Batch(number, self, before)

    def write(self, row: dict[str, Any]) -> None:
        if self._file is not None:
            with self._writes:
                self._file.write(f"{json.dumps(row)}\n".encode())
                self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            with self._writes:
                self._file.close()
                self._file = None


@dataclass
class Batch:
    """The responses to one batch of prompts."""

    number: int
    iteration: Iteration
    before: dict[int, SavedResponse]  # by place among the requests
    scores: dict[int, Scores] = field(default_factory=dict)  # of those taken from the disk
    taken: int = 0  # responses, from the disk
    # Places and functions of the scores that are there.
    _kept: set[tuple[int, str]] = field(default_factory=set)

    def completions(
        self, requests: Sequence[Request], ask: Ask
    ) -> Iterator[tuple[int, Completion]]:
        """Places of requests and their completions: first those on disk, then those that `ask`
        generates for the others, each on disk before it is handed on.

        Args:
          ask: answers the requests at these places.
        """
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
        """Writes what a function gave, unless it failed: it may not, another time."""
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
        """Those too that other processes have found."""
        for one in functions:
            for place, score in enumerate(one.pairs):
                self.keep(place, one.name, score)

    def _write(self, place: int, request: Request, done: Completion) -> None:
        row = {
            "policy": self.iteration.policy,
            "request": request.checksum,
            "tokens": done.tokens.tolist(),
            "truncated": done.is_truncated,
            "logprobs": _text(done.logprobs),
        }
        if done.unfiltered_logprobs is not None:
            row["unfiltered"] = _text(done.unfiltered_logprobs)
        if done.routed_experts is not None:
            row["routes"] = _text(done.routed_experts, ROUTES), done.routed_experts.shape[1:]
        self._write_row(place, row)

    def _write_row(self, place: int, row: dict[str, Any]) -> None:
        self.iteration.write({"batch": self.number, "place": place} | row)


def _read(lines: Sequence[bytes], policy: int) -> dict[tuple[int, int], SavedResponse]:
    """Responses of this policy by batch and place, with their scores; whatever else is there is not
    ours to use."""
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
        except (ValueError, TypeError, KeyError, OverflowError, AttributeError) as error:
            log.warning("a line of an unfinished iteration is left out: %r", error)
    return found


def _completion(row: dict[str, Any]) -> Completion:
    tokens, logprobs = np.array(row["tokens"], np.int32), _numbers(row["logprobs"])
    unfiltered = _numbers(row["unfiltered"]) if "unfiltered" in row else None
    for one in (logprobs, unfiltered):
        if one is not None and one.shape != tokens.shape:
            raise ValueError(f"{len(one)} log-probabilities of {len(tokens)} tokens")
    routes = None
    if "routes" in row:
        text, shape = row["routes"]
        routes = _numbers(text, ROUTES).reshape(-1, *map(int, shape))
    return Completion(
        tokens,
        logprobs,
        bool(row["truncated"]),
        unfiltered_logprobs=unfiltered,
        routed_experts=routes,
    )


def _score(row: dict[str, Any]) -> Score:
    value, numbers = row["score"], {str(k): float(x) for k, x in row["numbers"].items()}
    if value is None:
        return Failure(Cause.NONE, "returned None"), numbers
    return float(value), numbers


def _text(numbers: np.ndarray, dtype: str = "<f4") -> str:
    """Every bit of them."""
    return base64.b64encode(np.asarray(numbers, dtype).tobytes()).decode()


def _numbers(text: str, dtype: str = "<f4") -> np.ndarray:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype).astype(dtype[1:])
