"""A session: checks any number of requests, generates them, and yields each as it ends.

A request that cannot be generated gets a completion with a sentence of error; others continue.
The engine gets requests in batches of many times its capacity, so that its rows stay full without
reading all of a long file. Results do not depend on the batches: sampling keys belong to requests.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from pat_jax.common.hosts.together import process_group
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.record.report import RolloutReport
from pat_jax.engine.record.trace import DraftSums
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.planning.lengths.model import LengthModel, StreamedLengths
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.types import Load

WINDOW = 32  # requests that the engine gets at once, as a multiple of its capacity

Watch = Callable[[int, np.ndarray], bool]  # (request, its tokens so far) -> it has generated enough


class Session:
    """Serves requests with an engine that has its weights."""

    def __init__(self, engine: RolloutEngine, planner: Planner, *, max_length: int | None = None):
        """
        Args:
          max_length: tokens of the longest sequence, prompt and response; None allows what the
            engine's largest bucket and the model's context hold.
        """
        self.engine = engine
        self.planner = planner
        most = min(engine.specs.buckets.lengths[-1], engine.policy.config.max_position)
        # Tokens of the longest sequence, prompt and response, that can be generated.
        self.max_length = most if max_length is None else min(most, max_length)
        self.report = RolloutReport()  # report of the newest batch of requests
        self.drafts = DraftSums()  # sums over all batches that have ended
        # The distribution of response lengths so far.
        self.lengths = planner.expects or LengthModel.empty(engine.specs.buckets.lengths[-1])

    def stream(
        self,
        requests: Iterable[Request],
        *,
        watch: Watch | None = None,
        name: Callable[[int], str] = "request {}".format,
    ) -> Generator[tuple[int, Completion], None, None]:
        """Yields (index, completion) as requests end; an invalid request ends at once.

        Closing the generator early drops unfinished requests and frees the cache.

        Args:
          requests: read as they are needed.
          watch: called after every burst for each running request; True ends the request.
          name: returns the name of a request for error messages.
        """
        batch: dict[int, Request] = {}
        for i, request in enumerate(requests):
            if complaint := self.complaint(request):
                yield i, failed(f"{name(i)}: {complaint}")
                continue
            batch[i] = request
            if len(batch) == WINDOW * self.engine.capacity:
                yield from self._run(batch, watch, name)
                batch = {}
        if batch:
            yield from self._run(batch, watch, name)

    def complaint(self, request: Request) -> str:
        """Returns one sentence about what is wrong with a request; empty if it is valid."""
        config = self.engine.policy.config
        sampling = request.sampling
        length = len(request.tokens)
        most = self.max_length
        vocab = config.vocab_size
        max_logprobs = self.engine.specs.functions.max_logprobs
        if not length:
            return "the prompt is empty: expected at least one token."
        if unknown := [t for t in request.tokens if not 0 <= t < vocab]:
            return f"the prompt has the token id {unknown[0]}: expected ids from 0 to {vocab - 1}."
        if request.max_new_tokens < 1:
            return f"max_tokens is {request.max_new_tokens}: expected an integer of at least 1."
        if length >= config.max_position:
            return (
                f"the prompt has {length} tokens, but the model's context is {config.max_position}: "
                f"expected at most {config.max_position - 1}; shorten it."
            )
        if length + request.max_new_tokens > most:
            return (
                f"{length} tokens of prompt and up to {request.max_new_tokens} of response are more "
                f"than the {most} that fit: shorten the prompt or lower max_tokens."
            )
        if sampling.min_tokens > request.max_new_tokens:
            return (
                f"min_tokens is {sampling.min_tokens}: expected at most max_tokens, which is "
                f"{request.max_new_tokens}."
            )
        if unknown := [t for t in sampling.stop_token_ids if t >= vocab]:
            return f"stop_token_ids has {unknown[0]}: expected ids from 0 to {vocab - 1}."
        if sampling.logprobs > max_logprobs:
            return (
                f"logprobs is {sampling.logprobs}: expected at most {max_logprobs}, which were "
                "compiled in; raise max_logprobs."
            )
        return ""

    def _run(
        self, batch: dict[int, Request], watch: Watch | None, name: Callable[[int], str]
    ) -> Iterator[tuple[int, Completion]]:
        index = list(batch)
        requests = list(batch.values())
        self._to_first_layout(requests)
        seen = StreamedLengths(self.lengths, len(requests))
        self.report = RolloutReport()

        def learn() -> None:
            self.lengths = seen.model()
            self.planner.observe_rollout(self.lengths)

        def should_stop(i: int, tokens: np.ndarray) -> bool:
            if seen.has_news():  # of all bursts before this one
                learn()
            has_ended = watch is not None and watch(index[i], tokens)
            seen.note(i, len(tokens), has_ended=has_ended)
            return has_ended

        for i, done in self.engine.stream(requests, self.planner, self.report, should_stop):
            seen.note(i, len(done.tokens), has_ended=not done.is_truncated)
            if done.error:
                done = replace(done, error=f"{name(index[i])}: {done.error}.")
            yield index[i], done
        self.drafts += self.report.drafts
        learn()

    def _to_first_layout(self, requests: Sequence[Request]) -> None:
        begin = requests[: self.engine.capacity]
        none = np.zeros(len(begin), int)
        lengths = np.array([len(request.tokens) for request in begin])
        remaining_tokens = np.array([request.max_new_tokens for request in begin])
        load = Load(none, none, lengths, remaining_tokens, waiting=len(requests) - len(begin))
        start = process_group().agree("first layout", lambda: self.planner.start(load))
        first = self.engine.layouts[start]
        if first is not self.engine.layout:
            self.engine.weights.reshard(first)


def failed(error: str) -> Completion:
    """The completion of a request that was not generated."""
    return Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), True, error=error)
