"""Accounts for sequences: which row each sits in, what it has said, when it is done.

All on the host, in NumPy. Decides nothing about layouts and touches no device array.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pat_jax.engine.state import BurstOutput, RowState
from pat_jax.engine.types import PLAIN, Sampling, token_set
from pat_jax.planning.types import Load, Siblings

NO_ROW = -1


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
    logprobs: np.ndarray  # float32[length]
    is_truncated: bool  # cut at max_new_tokens before a token that ends it
    # The likeliest tokens, likeliest first, and their log-probabilities by the model alone, without
    # penalties, temperature and filters: int32 and float32[length, Sampling.logprobs], if asked for.
    top_tokens: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    error: str = ""  # one sentence where the request could not be generated to its end


class Accounts:
    """How far each sequence has come and which row it sits in; not what it says.

    Rows of group g are g·R … (g + 1)·R - 1. The simulator keeps the same accounts as the engine.
    """

    def __init__(
        self,
        prompt_length: np.ndarray,  # int[sequences], tokens
        max_new_tokens: np.ndarray,  # int[sequences]
        *,
        prompt_id: np.ndarray | None = None,  # int[sequences], where every prompt is known
        num_groups: int,
        rows_per_group: int,
    ):
        self.num_groups, self.rows_per_group = num_groups, rows_per_group
        self.prompt_length = np.asarray(prompt_length, np.int32)
        self.end = self.prompt_length + np.asarray(max_new_tokens, np.int32)
        self.length = self.prompt_length.copy()
        self.is_done = np.zeros(len(self.length), bool)
        self.has_prompt_ids = prompt_id is not None
        ids = np.zeros(0, np.int64) if prompt_id is None else prompt_id
        self.prompt_id, self.sibling = np.unique(ids, return_inverse=True)
        self.num_steps = 0  # decode steps so far
        self.done_after = np.zeros(len(self.length), np.int64)  # decode steps, of those done
        # The samples of a prompt are neighbours: deal prompts out evenly by turns.
        self.row = self._deal(np.arange(len(self.length)), num_groups, rows_per_group)

    @staticmethod
    def _deal(order: np.ndarray, num_groups: int, rows_per_group: int) -> np.ndarray:
        """The row of each sequence when `order` is dealt out to the groups in equal runs."""
        per_group = -(-len(order) // num_groups)
        if per_group > rows_per_group:
            raise ValueError(
                f"{len(order)} sequences do not fit {num_groups} groups of {rows_per_group} rows."
            )
        turn = np.arange(len(order))
        row = np.empty(len(order), np.int64)
        row[order] = (turn // per_group) * rows_per_group + turn % per_group
        return row

    @property
    def live(self) -> np.ndarray:
        """Indices of the unfinished sequences."""
        return np.flatnonzero(~self.is_done)

    @property
    def has_work(self) -> bool:
        return not self.is_done.all()

    @property
    def fullest(self) -> int:
        """Live sequences of the fullest group."""
        return int(np.bincount(self._group(self.live), minlength=1).max())

    @property
    def max_context(self) -> int:
        """Tokens in the cache of the longest live sequence."""
        return int(self.length[self.live].max()) - 1

    def load(self) -> Load:
        live = self.live
        return Load(
            group=self._group(live),
            generated=self.length[live] - self.prompt_length[live],
            context=self.length[live] - 1,
            budget=self.end[live] - self.length[live],
            siblings=self._siblings(live) if self.has_prompt_ids else None,
        )

    def _siblings(self, live: np.ndarray) -> Siblings:
        done = np.flatnonzero(self.is_done)
        return Siblings(
            prompt=self.prompt_id,
            of_live=self.sibling[live],
            of_done=self.sibling[done],
            done=self.length[done] - self.prompt_length[done],
            is_cut=self.length[done] == self.end[done],
        )

    def _group(self, sequences: np.ndarray) -> np.ndarray:
        return self.row[sequences] // self.rows_per_group

    def advance(self, emitted: np.ndarray, still_live: np.ndarray, steps: int) -> None:
        """After a burst of `steps`: int[live] new tokens, bool[live]; the ended give up their rows."""
        live = self.live
        self.length[live] += emitted
        self.is_done[live] = ~still_live
        self.done_after[live] = self.num_steps + emitted
        self.num_steps += steps
        self.row[self.is_done] = NO_ROW

    def end_now(self, sequences: np.ndarray) -> None:
        """Live sequences that are to say nothing more."""
        self.is_done[sequences] = True
        self.done_after[sequences] = self.num_steps
        self.row[sequences] = NO_ROW

    def compact(self, new_rows: int) -> np.ndarray:
        """Moves the live sequences of each group to its first rows, of a new row bucket.

        Returns int32[groups · new_rows]: the old row within its group that each new row takes.
        """
        picks = np.zeros((self.num_groups, new_rows), np.int32)
        filled = np.zeros(self.num_groups, np.int64)
        live = self.live
        for i in live[np.argsort(self.row[live], kind="stable")]:
            group, old = divmod(int(self.row[i]), self.rows_per_group)
            picks[group, filled[group]] = old
            self.row[i] = group * new_rows + filled[group]
            filled[group] += 1
        self.rows_per_group = new_rows
        return picks.reshape(-1)

    def regroup(self, num_groups: int, is_recomputed: np.ndarray) -> np.ndarray:
        """The group that each live sequence gets in a switch to `num_groups`, int[live].

        A sequence that migrates stays with devices that hold a part of it. Groups merge with those
        congruent modulo the number of groups afterwards, and split into those congruent modulo the
        number before. One that is recomputed, bool[live], goes wherever most room is. Longest first,
        so that those likely to run longest go to different groups.
        """
        live, before = self.live, self.num_groups
        old = self._group(live)
        new, filled = np.empty(len(live), np.int64), np.zeros(num_groups, np.int64)
        everywhere = np.arange(num_groups)
        for i in np.lexsort((-self.length[live], is_recomputed)):
            choice = everywhere if is_recomputed[i] else everywhere[old[i] % num_groups :: before]
            new[i] = choice[filled[choice].argmin()]
            filled[new[i]] += 1
        return new

    def seat(self, group: np.ndarray, *, num_groups: int, rows_per_group: int) -> None:
        """Gives every live sequence a row of its `group`, int[live]; longest first."""
        live = self.live
        order = np.lexsort((-self.length[live], group))
        start = np.searchsorted(group[order], np.arange(num_groups))
        turn = np.arange(len(live)) - start[group[order]]
        if len(live) and turn.max() >= rows_per_group:
            raise ValueError(
                f"{turn.max() + 1} sequences do not fit a group of {rows_per_group} rows."
            )
        self.row[live[order]] = group[order] * rows_per_group + turn
        self.num_groups, self.rows_per_group = num_groups, rows_per_group


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
            if wanted := self.requests[i].sampling.logprobs:
                self.top[i].append(
                    (
                        output.top_tokens[self.row[i], :count, :wanted],
                        output.top_logprobs[self.row[i], :count, :wanted],
                    )
                )
        self.advance(emitted, still_live[self.row[live]], int(output.steps))
        return int(emitted.sum())

    def response(self, i: int) -> np.ndarray:
        """What sequence i has said so far, int32[tokens]; not a copy."""
        return self.tokens[i, self.prompt_length[i] : self.length[i]]

    def completions(self, eos_ids: Sequence[int]) -> list[Completion]:
        return [self.completion(i, eos_ids) for i in range(len(self.requests))]

    def completion(self, i: int, eos_ids: Sequence[int]) -> Completion:
        """What sequence i has said."""
        request, at = self.requests[i], slice(self.prompt_length[i], self.length[i])
        tokens, logprobs = self.tokens[i, at].copy(), self.logprobs[i, at].copy()
        endings = {*request.sampling.stop_token_ids, *(() if request.ignore_eos else eos_ids)}
        top, error = [np.concatenate(part) for part in zip(*self.top[i], strict=True)], ""
        if len(tokens) and np.isnan(logprobs[-1]):
            # The token was drawn from logits that are no numbers: it is not part of the response.
            tokens, logprobs, top = tokens[:-1], logprobs[:-1], [part[:-1] for part in top]
            error = f"the logits of token {len(tokens) + 1} of the response are not numbers (NaN)"
        has_ended = len(tokens) > 0 and int(tokens[-1]) in endings
        return Completion(tokens, logprobs, not has_ended, *top, error=error)
