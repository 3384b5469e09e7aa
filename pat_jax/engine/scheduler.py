"""What each sequence was asked and what it has said, from requests to completions.

All on the host, in NumPy. Decides nothing about layouts and touches no device array.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pat_jax.engine.accounts import Accounts
from pat_jax.engine.state import BurstOutput, RowState


@dataclass(frozen=True)
class Request:
    """One sequence to generate."""

    tokens: tuple[int, ...]  # the prompt
    key: np.ndarray  # uint32[2], see sampling.sequence_key
    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    ignore_eos: bool = False
    prompt_id: int | None = None  # requests with the same one are siblings: see LengthModel


@dataclass(frozen=True)
class Completion:
    tokens: np.ndarray  # int32[length], an end-of-sequence token included
    logprobs: np.ndarray  # float32[length]
    is_truncated: bool  # cut at max_new_tokens before an end-of-sequence token


class Scheduler(Accounts):
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
        for i, request in enumerate(requests):
            self.tokens[i, : len(request.tokens)] = request.tokens

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
            rows.temperature[row] = request.temperature
            rows.top_k[row] = request.top_k
            rows.top_p[row] = request.top_p
        return rows

    def retire(self, output: BurstOutput, still_live: np.ndarray) -> int:
        """Takes over what a burst sampled; sequences that ended give up their rows.

        Returns the number of tokens sampled.
        """
        live = self.live
        emitted = np.asarray(output.emitted)[self.row[live]]
        for i, count in zip(live, emitted, strict=True):
            at = slice(self.length[i], self.length[i] + count)
            self.tokens[i, at] = output.tokens[self.row[i], :count]
            self.logprobs[i, at] = output.logprobs[self.row[i], :count]
        self.advance(emitted, still_live[self.row[live]], int(output.steps))
        return int(emitted.sum())

    def completions(self, eos_ids: Sequence[int]) -> list[Completion]:
        return [self._completion(i, eos_ids) for i in range(len(self.requests))]

    def _completion(self, i: int, eos_ids: Sequence[int]) -> Completion:
        at = slice(self.prompt_length[i], self.length[i])
        tokens = self.tokens[i, at].copy()
        has_ended = (
            len(tokens) > 0 and int(tokens[-1]) in eos_ids and not self.requests[i].ignore_eos
        )
        return Completion(tokens, self.logprobs[i, at].copy(), is_truncated=not has_ended)
