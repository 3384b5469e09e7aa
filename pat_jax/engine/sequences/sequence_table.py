"""What each sequence was asked and what it has said, from requests to completions.

All on the host, in NumPy. Decides nothing about layouts and touches no device array.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pat_jax.engine.sequences.accounts import NO_SEQUENCE, Accounts
from pat_jax.engine.sequences.state import BurstOutput, RowState
from pat_jax.engine.sequences.types import PLAIN, Sampling, token_set


@dataclass(frozen=True)
class Request:
    """One sequence to generate."""

    tokens: tuple[int, ...]  # the prompt
    key: np.ndarray  # uint32[2], see sampling.sequence_key
    max_new_tokens: int
    sampling: Sampling = PLAIN
    ignore_eos: bool = False
    prompt_id: int | None = None  # requests with the same one are siblings: see LengthModel


@dataclass(frozen=True)
class Completion:
    tokens: np.ndarray  # int32[length], the token that ended it included
    logprobs: np.ndarray  # float32[length], under the distribution that each token was drawn from
    is_truncated: bool  # cut at max_new_tokens before a token that ends it
    # The likeliest tokens, likeliest first, and their log-probabilities by the model alone, without
    # penalties, temperature and filters: int32 and float32[length, Sampling.logprobs], if asked for.
    top_tokens: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    # float32[length], under softmax(logits / temperature); None: they are `logprobs`.
    unfiltered_logprobs: np.ndarray | None = None
    error: str = ""  # one sentence where the request could not be generated to its end


class SequenceTable(Accounts):
    """The sequences of one rollout, their tokens included."""

    def __init__(self, requests: Sequence[Request], *, num_groups: int, rows_per_group: int):
        self.requests = requests
        ids = [r.prompt_id for r in requests if r.prompt_id is not None]
        super().__init__(
            np.array([len(r.tokens) for r in requests], np.int32),
            np.array([r.max_new_tokens for r in requests], np.int32),
            prompt_id=np.array(ids, np.int64) if len(ids) == len(requests) else None,
            num_groups=num_groups,
            rows_per_group=rows_per_group,
        )
        self.tokens = np.zeros((len(requests), int(self.end.max(initial=1))), np.int32)
        self.logprobs = np.zeros(self.tokens.shape, np.float32)
        # Of those drawn from another distribution than the policy's own, burst by burst.
        self.unfiltered: list[list[np.ndarray]] = [[] for _ in requests]
        for i, request in enumerate(requests):
            self.tokens[i, : len(request.tokens)] = request.tokens
        # Of each sequence, burst by burst, where it wants them.
        self.top: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in requests]

    def row_state(self) -> RowState:
        """The host's copy of every row's numbers, to be put on the devices."""
        rows = RowState.empty(self.num_groups * self.rows_per_group)
        for i in self.live:
            request, row = self.requests[i], self.row[i]
            rows.last_token[row] = self.tokens[i, self.length[i] - 1]
            rows.position[row] = self.length[i] - 1
            rows.end[row] = self.end[i]
            rows.live[row] = True
            rows.ignore_eos[row] = request.ignore_eos
            rows.key[row] = request.key
            rows.sampling.put(int(row), request.sampling, len(request.tokens))
        return rows

    @property
    def has_penalties(self) -> bool:
        """Some live sequence is drawn by which tokens occurred."""
        return any(self.requests[i].sampling.has_penalty for i in self.live)

    def seen(self, shape: tuple[int, int, int]) -> np.ndarray:
        """The tokens of each row's text and response as bits, for rows with a penalty; see sampling."""
        words = np.zeros(shape, np.uint32)
        for i in self.live:
            if self.requests[i].sampling.has_penalty:
                text = self.tokens[i, : self.length[i]]
                for part, tokens in enumerate((text, text[self.prompt_length[i] :])):
                    words[self.row[i], part] = token_set(tokens, 32 * shape[-1])
        return words

    def retire(self, output: BurstOutput) -> int:
        """Takes over what a burst sampled; sequences that ended give up their rows.

        Nothing that it says of rows given up since it began matters any more.

        Returns the number of tokens sampled.
        """
        live = self.live
        emitted = np.asarray(output.emitted)[self.row[live]]
        for i, count in zip(live, emitted, strict=True):
            at = slice(self.length[i], self.length[i] + count)
            self.tokens[i, at] = output.tokens[self.row[i], :count]
            self.logprobs[i, at] = output.logprobs[self.row[i], :count]
            if not self.requests[i].sampling.is_plain:
                self.unfiltered[i].append(output.unfiltered[self.row[i], :count])
            if wanted := self.requests[i].sampling.logprobs:
                self.top[i].append(
                    (
                        output.top_tokens[self.row[i], :count, :wanted],
                        output.top_logprobs[self.row[i], :count, :wanted],
                    )
                )
        self.advance(emitted, np.asarray(output.live)[self.row[live]], int(output.steps))
        return int(emitted.sum())

    def failed_unheard(self, output: BurstOutput) -> list[int]:
        """Groups with a row that drew from logits that are no numbers after it had been given up."""
        rows = np.flatnonzero((self.occupants == NO_SEQUENCE) & (np.asarray(output.emitted) > 0))
        is_spoilt = [np.isnan(output.logprobs[row, : output.emitted[row]]).any() for row in rows]
        return np.unique(rows[np.array(is_spoilt, bool)] // self.rows_per_group).tolist()

    def response(self, i: int) -> np.ndarray:
        """What sequence i has said so far, int32[tokens]; not a copy."""
        return self.tokens[i, self.prompt_length[i] : self.length[i]]

    def has_failed(self, i: int) -> bool:
        """The newest token of sequence i was drawn from logits that are no numbers."""
        has_said = self.length[i] > self.prompt_length[i]
        return bool(has_said and np.isnan(self.logprobs[i, self.length[i] - 1]))

    def completions(self, eos_ids: Sequence[int]) -> list[Completion]:
        return [self.completion(i, eos_ids) for i in range(len(self.requests))]

    def completion(self, i: int, eos_ids: Sequence[int]) -> Completion:
        """What sequence i has said."""
        request, at = self.requests[i], slice(self.prompt_length[i], self.length[i])
        tokens, logprobs = self.tokens[i, at].copy(), self.logprobs[i, at].copy()
        endings = {*request.sampling.stop_token_ids, *(() if request.ignore_eos else eos_ids)}
        top, error = [np.concatenate(part) for part in zip(*self.top[i], strict=True)], ""
        unfiltered = np.concatenate(self.unfiltered[i]) if self.unfiltered[i] else None
        if self.has_failed(i):
            # The token was drawn from logits that are no numbers: it is not part of the response.
            tokens, logprobs, top = tokens[:-1], logprobs[:-1], [part[:-1] for part in top]
            unfiltered = None if unfiltered is None else unfiltered[:-1]
            error = f"the logits of token {len(tokens) + 1} of the response are not numbers (NaN)"
        has_ended = len(tokens) > 0 and int(tokens[-1]) in endings
        return Completion(
            tokens, logprobs, not has_ended, *top, unfiltered_logprobs=unfiltered, error=error
        )
