"""Generates results from prompts: each result once, in the order of the prompts."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from pat_jax.batch_generation.answers import StopFinder, describe
from pat_jax.batch_generation.overrides import SamplingOverrides
from pat_jax.batch_generation.prompt_lines import LineRequest, parse_ask
from pat_jax.batch_generation.prompts import COPIED, Prompts, parse_object
from pat_jax.batch_generation.result_file import ResultFile
from pat_jax.common.bars import bar
from pat_jax.common.errors import UserError
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.engine.session import Session, failed
from pat_jax.rl.text.tokenizer import Tokenizer


@dataclass
class Entry:
    """One pending result: a sample of a line, or the error of an invalid line."""

    line: int  # number of the prompt, which is that of its line in a file
    sample: int  # number of the sample among those of the line
    fields: dict[str, Any]  # fields copied from the line to the result
    is_last: bool  # whether it is the last result of its line
    ask: LineRequest | None = None
    finder: StopFinder | None = None
    # A thread's search for a stop string in the tokens generated before the last burst.
    search: Future[bool] | None = None


@dataclass(eq=False)
class BatchJob:
    """Generates the results of prompts and writes them in order."""

    prompts: Prompts
    seed: int
    session: Session
    tokenizer: Tokenizer | None
    overrides: SamplingOverrides  # the command's sampling options; those of a line win over them
    recommended: SamplingOverrides  # apply where neither the line nor the command sets an option
    results: ResultFile
    num_errors: int = 0
    num_tokens: int = 0

    def __post_init__(self) -> None:
        self.waiting: dict[int, Entry] = {}  # by the result's index in the results file
        self.ready: dict[int, tuple[Entry, Future[dict[str, Any]]]] = {}
        self.places: list[int] = []  # for each request of the session, the index of its result
        self.num_written = len(self.results.done)
        self.tokenizing = threading.Lock()  # a tokenizer serves one thread at a time

    def check(self) -> None:
        """Raises UserError with one sentence about the first prompt that is invalid."""
        for number, line in self.prompts:
            for entry, error in self._entries(number, line):
                if entry.ask is not None:
                    error = self.session.complaint(self._request(entry, entry.ask))
                if error:
                    raise UserError(f"{self.prompts.where(number)}: {error}")

    def run(self) -> str:
        """Generates and writes all results. Returns a sentence about how many there are."""
        start = time.perf_counter()
        total = sum(1 for _ in self.prompts)
        self.bar = bar(total=total, unit="prompt")
        with self.bar, ThreadPoolExecutor(1) as self.workers:
            stream = self.session.stream(self._requests(), watch=self._watch, name=self._name)
            with closing(stream):  # an exception would keep the cache
                for i, done in stream:
                    self._finish(self.places[i], done)
                    self._write(wait=False)
            self._write(wait=True)
        seconds = time.perf_counter() - start
        errors = f", {self.num_errors} of them errors" if self.num_errors else ""
        spent = f"{self.num_tokens:,} tokens in {seconds:.1f} s"
        return f"{self.num_written} results in {self.results.path}{errors}; {spent}"

    def _requests(self) -> Iterator[Request]:
        """Yields the requests without a written result; an invalid line gets an error as result."""
        place = 0
        for number, line in self.prompts:
            for entry, error in self._entries(number, line):
                if place < len(self.results.done):
                    self.results.check(place, entry.line, entry.sample)
                    self.bar.update(entry.is_last)
                else:
                    self.waiting[place] = entry
                    if entry.ask is None:
                        self._finish(place, failed(f"{self.prompts.where(number)}: {error}"))
                    else:
                        self.places.append(place)
                        yield self._request(entry, entry.ask)
                place += 1
        if place < len(self.results.done):
            raise UserError(
                f"{self.results.path} has {len(self.results.done)} results, but {self.prompts.name} asks for "
                f"{place}: expected the prompts that they are of; choose another --out."
            )

    def _request(self, entry: Entry, ask: LineRequest) -> Request:
        return ask.request(self.seed, entry.line, entry.sample)

    def _entries(self, number: int, line: bytes | dict[str, Any]) -> Iterator[tuple[Entry, str]]:
        given: dict[str, Any] = {}
        try:
            given = parse_object(line)
            with self.tokenizing:
                ask = parse_ask(
                    given,
                    self.overrides,
                    self.recommended,
                    self.tokenizer,
                    max_length=self.session.max_length,
                )
        except ValueError as error:
            yield Entry(number, 0, _copied(given), is_last=True), str(error)
            return
        for sample in range(ask.num_samples):
            is_last = sample == ask.num_samples - 1
            finder = ask.finder(self.tokenizer)
            yield Entry(number, sample, _copied(given), is_last, ask, finder), ""

    def _name(self, i: int) -> str:
        return self.prompts.where(self.waiting[self.places[i]].line)

    def _watch(self, i: int, tokens: np.ndarray) -> bool:
        """Returns whether a stop string was found in the tokens before the last burst.

        Each burst's tokens are searched while the next one runs. So a response may run one burst
        longer than needed, or two if bursts are dispatched ahead. The result has nothing after the
        stop string.
        """
        entry = self.waiting[self.places[i]]
        if entry.finder is None:
            return False
        if entry.search is not None and entry.search.result():
            return True
        entry.search = self.workers.submit(self._search, entry.finder, tokens.copy())
        return False

    def _search(self, finder: StopFinder, tokens: np.ndarray) -> bool:
        with self.tokenizing:
            return finder.has_stopped(tokens)

    def _finish(self, place: int, done: Completion) -> None:
        """Starts to make the result of a finished response, in the worker's thread."""
        entry = self.waiting.pop(place)
        self.ready[place] = entry, self.workers.submit(self._result, entry, done)

    def _result(self, entry: Entry, done: Completion) -> dict[str, Any]:
        result: dict[str, Any] = {"line": entry.line, "sample": entry.sample, **entry.fields}
        ask = entry.ask
        with self.tokenizing:
            wants = ask is not None and ask.wants_logprobs
            result |= describe(done, self.tokenizer, entry.finder, wants_logprobs=wants)
        prompt = len(ask.tokens) if ask else 0
        response = len(result["token_ids"])
        return result | {"usage": {"prompt_tokens": prompt, "completion_tokens": response}}

    def _write(self, *, wait: bool) -> None:
        """Writes the next results in order, as far as they are ready; `wait` waits for all."""
        while self.num_written in self.ready and (wait or self.ready[self.num_written][1].done()):
            entry, future = self.ready.pop(self.num_written)
            result = future.result()
            self.results.write(result)
            self.num_written += 1
            self.num_errors += "error" in result
            self.num_tokens += result["usage"]["completion_tokens"]
            self.bar.update(entry.is_last)


def _copied(given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in COPIED if name in given}
