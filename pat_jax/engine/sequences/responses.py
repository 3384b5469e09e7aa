"""The requests of a rollout and their responses so far; makes completions of them.

All on the host, in NumPy. Decides nothing about layouts and touches no device array.
"""

import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from pat_jax.engine.sequences.contents import Contents
from pat_jax.engine.sequences.routes import Routes, TokenRoutes
from pat_jax.engine.sequences.sampling import PLAIN, Sampling
from pat_jax.engine.sequences.sequence_table import NO_SEQUENCE, SequenceTable
from pat_jax.engine.sequences.state import BurstOutput, RowState, Runs
from pat_jax.engine.sequences.types import token_set


@dataclass(frozen=True)
class Request:
    """A request: one response to generate."""

    tokens: tuple[int, ...]  # the prompt
    key: np.ndarray  # uint32[2], the key of its random numbers, see sampling.sequence_key
    max_new_tokens: int
    sampling: Sampling = PLAIN
    ignore_eos: bool = False
    prompt_id: int | None = None  # requests with the same id are siblings, see LengthModel

    @property
    def checksum(self) -> int:
        """A checksum of everything that the response depends on, except the model."""
        drawn = self.key.tolist(), astuple(self.sampling)
        whole = self.tokens, self.max_new_tokens, self.ignore_eos, *drawn
        return zlib.crc32(repr(whole).encode())


@dataclass(frozen=True)
class Completion:
    tokens: np.ndarray  # int32[length], the token that ended it included
    logprobs: np.ndarray  # float32[length], under the distribution that each token was drawn from
    is_truncated: bool  # no token ended it before max_new_tokens
    # The likeliest tokens, likeliest first, and their log-probabilities by the model alone, without
    # penalties, temperature and filters: int32 and float32[length, Sampling.logprobs], if asked for.
    top_tokens: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    # float32[length], under softmax(logits / temperature); None: equal to `logprobs`.
    unfiltered_logprobs: np.ndarray | None = None
    # int16[prompt + length - 1, layers, k]: the experts that computed each token but the last, in
    # layers with experts. None: no layer has experts.
    routed_experts: TokenRoutes | None = None
    error: str = ""  # one sentence if the response could not be completed


class Responses(Contents):
    """The requests of a table's sequences, and their tokens."""

    def __init__(
        self, requests: Sequence[Request], table: SequenceTable, routes_shape: tuple[int, int]
    ):
        super().__init__(table)
        self.requests = requests
        prompts: dict[tuple[int, ...], int] = {}
        numbers = [prompts.setdefault(request.tokens, len(prompts)) for request in requests]
        self.prompt = np.array(numbers, np.int64)
        self.routes = Routes(list(prompts), self.prompt, routes_shape)
        self._by_prompt = np.argsort(self.prompt, kind="stable")
        self.tokens = np.zeros((len(requests), int(table.end.max(initial=1))), np.int32)
        self.logprobs = np.zeros(self.tokens.shape, np.float32)
        # Log-probabilities of sequences with penalties or filters, burst by burst.
        self.unfiltered: list[list[np.ndarray]] = [[] for _ in requests]
        for i, request in enumerate(requests):
            self.tokens[i, : len(request.tokens)] = request.tokens
        self.runs = Runs.none(len(requests))  # each sequence's run of drafts after its last burst
        # Likeliest tokens of sequences that want them, burst by burst.
        self.top: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in requests]

    @classmethod
    def of(
        cls,
        requests: Sequence[Request],
        *,
        num_replicas: int,
        rows_per_replica: int,
        routes_shape: tuple[int, int] = (0, 0),
    ) -> "Responses":
        """Makes a table of sequences in which all requests wait, and their empty responses.

        Args:
          routes_shape: `ModelConfig.routes_shape`.
        """
        ids = [r.prompt_id for r in requests if r.prompt_id is not None]
        table = SequenceTable(
            np.array([len(r.tokens) for r in requests], np.int32),
            np.array([r.max_new_tokens for r in requests], np.int32),
            prompt_id=np.array(ids, np.int64) if len(ids) == len(requests) else None,
            num_replicas=num_replicas,
            rows_per_replica=rows_per_replica,
        )
        return cls(requests, table, routes_shape)

    def samples(self, prompt: int) -> np.ndarray:
        """Returns the sequences of prompt number `prompt`, int[samples]; see `self.prompt`."""
        first, stop = np.searchsorted(self.prompt[self._by_prompt], (prompt, prompt + 1))
        return self._by_prompt[first:stop]

    def known(self, i: int) -> np.ndarray:
        """Returns prompt and response of sequence i so far, int32[length]; not a copy."""
        return self.tokens[i, : self.table.length[i]]

    def row_state(self) -> RowState:
        """Returns the state of every row as host arrays, to put on the devices."""
        table = self.table
        rows = RowState.empty(table.num_replicas * table.rows_per_replica)
        for i in table.running:
            request, row = self.requests[i], table.row[i]
            rows.last_token[row] = self.tokens[i, table.length[i] - 1]
            rows.position[row] = table.length[i] - 1
            rows.end[row] = table.end[i]
            rows.running[row] = True
            rows.ignore_eos[row] = request.ignore_eos
            rows.key[row] = request.key
            rows.sampling.put(int(row), request.sampling, len(request.tokens))
        return rows

    def runs_of_rows(self) -> Runs:
        """Returns the run of drafts that each row's last step left, as host arrays."""
        table = self.table
        rows = Runs.none(table.num_replicas * table.rows_per_replica)
        for of_row, of_sequence in zip(rows, self.runs, strict=True):
            of_row[table.row[table.running]] = of_sequence[table.running]
        return rows

    @property
    def has_penalties(self) -> bool:
        """Whether a running sequence has a penalty."""
        return any(self.requests[i].sampling.has_penalty for i in self.table.running)

    def seen(self, shape: tuple[int, int, int]) -> np.ndarray:
        """Returns which tokens occur in each row, as bits (`Seen`), for rows with a penalty."""
        table = self.table
        words = np.zeros(shape, np.uint32)
        for i in table.running:
            if self.requests[i].sampling.has_penalty:
                for part, tokens in enumerate((self.known(i), self.response(i))):
                    words[table.row[i], part] = token_set(tokens, 32 * shape[-1])
        return words

    def take(self, output: BurstOutput) -> None:
        """Stores what a burst generated for the running sequences; call it before `advance`.

        Tokens of rows whose sequences were ended since the burst began are dropped.
        """
        table = self.table
        rows, length = table.row[table.running], table.length[table.running]
        counts = np.asarray(output.emitted)[rows]
        for of_sequence, of_row in zip(self.runs, output.runs, strict=True):
            of_sequence[table.running] = np.asarray(of_row)[rows]
        for i, row, start, count in zip(table.running, rows, length, counts, strict=True):
            at = slice(start, start + count)
            sampling = self.requests[i].sampling
            self.tokens[i, at] = output.tokens[row, :count]
            self.logprobs[i, at] = output.logprobs[row, :count]
            if not sampling.is_plain:
                self.unfiltered[i].append(output.unfiltered[row, :count])
            if output.routed_experts.size:
                self.routes.add(i, np.asarray(output.routed_experts[row, :count]))
            if wanted := sampling.logprobs:
                likeliest = output.top_tokens, output.top_logprobs
                self.top[i].append(tuple(one[row, :count, :wanted] for one in likeliest))

    def poisoned_replicas(self, output: BurstOutput) -> list[int]:
        """Returns replicas where a row sampled from NaN logits after its sequence was ended."""
        table = self.table
        rows = np.flatnonzero(
            (table.row_to_sequence == NO_SEQUENCE) & (np.asarray(output.emitted) > 0)
        )
        is_poisoned = [np.isnan(output.logprobs[row, : output.emitted[row]]).any() for row in rows]
        return np.unique(rows[np.array(is_poisoned, bool)] // table.rows_per_replica).tolist()

    def response(self, i: int) -> np.ndarray:
        """Returns what sequence i has generated so far, int32[tokens]; not a copy."""
        return self.known(i)[self.table.prompt_length[i] :]

    def has_failed(self, i: int) -> bool:
        """Returns whether the newest token of sequence i was sampled from NaN logits."""
        length = self.table.length[i]
        has_generated = length > self.table.prompt_length[i]
        return bool(has_generated and np.isnan(self.logprobs[i, length - 1]))

    def completion(self, i: int, eos_ids: Sequence[int]) -> Completion:
        """Returns the completion of sequence i."""
        table = self.table
        request = self.requests[i]
        at = slice(table.prompt_length[i], table.length[i])
        tokens, logprobs = self.tokens[i, at].copy(), self.logprobs[i, at].copy()
        endings = {*request.sampling.stop_token_ids, *(() if request.ignore_eos else eos_ids)}
        top = [np.concatenate(part) for part in zip(*self.top[i], strict=True)]
        error = ""
        unfiltered = np.concatenate(self.unfiltered[i]) if self.unfiltered[i] else None
        if self.has_failed(i):
            # The last token was sampled from NaN logits: it is not part of the response.
            tokens = tokens[:-1]
            logprobs = logprobs[:-1]
            top = [part[:-1] for part in top]
            unfiltered = None if unfiltered is None else unfiltered[:-1]
            error = f"the logits of token {len(tokens) + 1} of the response are not numbers (NaN)"
        has_ended = len(tokens) > 0 and int(tokens[-1]) in endings
        routes = None
        if all(self.routes.shape):
            routes = self.routes.whole(i)[: len(request.tokens) + len(tokens) - 1]
        top_tokens, top_logprobs = top or (None, None)
        return Completion(
            tokens,
            logprobs,
            not has_ended,
            top_tokens,
            top_logprobs,
            unfiltered_logprobs=unfiltered,
            routed_experts=routes,
            error=error,
        )
