"""Problems in order: which prompts each iteration trains on, and which are held out.

Knows prompts, splits and epochs. Does not know file formats (`problem_files.py`) or rewards. The
built-in task (`arithmetic.py`) has the same `batch` and `first`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pat_jax.common.errors import UserError
from pat_jax.rl.chat_template import ChatTemplateError
from pat_jax.rl.plain_text import has_more_tokens
from pat_jax.rl.problem_files import Columns, Row, read_problem_file
from pat_jax.rl.subset import Subset, subset_of
from pat_jax.rl.tokenizer import Tokenizer, flatten_messages
from pat_jax.rl.types import Prompt

HELDOUT_SHARE = 0.1


class Problems:
    """A fixed set of prompts, in a new random order every epoch.

    An epoch is as many whole batches as the set holds. Its last `len(self) % size` prompts, others
    in every epoch, wait for a later epoch, so that no batch holds a prompt twice.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, name: str):
        self.name = name  # what messages call the set
        self._prompts = tuple(prompts)
        self._seed = seed

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]

    def batch(self, step: int, size: int) -> list[Prompt]:
        """The `size` different prompts of iteration `step`: a pure function.

        Raises:
          UserError: there are fewer than `size`.
        """
        if size > len(self):
            raise UserError(
                f"{self.name} has {len(self)} prompts, fewer than one batch of {size}: expected at "
                "least as many; use more data, smaller batches, or a longer "
                "--rollout.max_prompt_length if prompts were filtered out."
            )
        epoch, position = divmod(step, self.batches_per_epoch(size))
        order = self._order(epoch)
        return [self._prompts[index] for index in order[position * size : (position + 1) * size]]

    def batches_per_epoch(self, size: int) -> int:
        return len(self) // size

    def first(self, count: int) -> list[Prompt]:
        """Up to `count` prompts, always the same ones: what evaluations use."""
        return [self._prompts[index] for index in self._order(0)[:count]]

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self._seed, epoch)).permutation(len(self))


@dataclass(frozen=True)
class ProblemSplits:
    train: Problems
    heldout: Problems
    max_prompt_length: int
    num_too_long: int
    without_answer: Sequence[str]  # where

    def __str__(self) -> str:
        counts = {"to train on": len(self.train), "held out": len(self.heldout)}
        kept = ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "none"
        first = f" (the first: {self.without_answer[0]})" if self.without_answer else ""
        return (
            f"problems: {kept}; left out: {self.num_too_long} longer than {self.max_prompt_length} tokens, "
            f"{len(self.without_answer)} without an answer{first}"
        )


def load_problems(
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    *,
    seed: int,
    max_prompt_length: int,
    heldout_share: float = HELDOUT_SHARE,
    columns: Columns | None = None,
    is_compared: bool = True,
) -> ProblemSplits:
    """Reads, tokenises, filters and splits files of problems.

    A prompt's id is its line or row number, counted on from file to file. The split follows from
    the problem's text and the order of the held-out set is fixed: neither depends on `seed`.

    Args:
      columns, is_compared: see `read_problem_file`.

    Raises:
      UserError: a file or one of its rows cannot be used.
    """
    prompts: dict[Subset, list[Prompt]] = {Subset.TRAIN: [], Subset.HELDOUT: []}
    without_answer: list[str] = []
    tokens, num_too_long, num_before = _Tokens(tokenizer, max_prompt_length), 0, 0
    for path in paths:
        file = read_problem_file(path, columns, is_compared=is_compared)
        for row in file.rows:
            if (found := tokens.of(row)) is None:
                num_too_long += 1
                continue
            text = flatten_messages(row.prompt)
            prompt = Prompt(num_before + row.number, found, text, row.columns)
            prompts[subset_of(row.text, heldout_share)].append(prompt)
        num_before += file.last_number
        without_answer += file.without_answer
    name = f"{paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''}"
    return ProblemSplits(
        train=Problems(prompts[Subset.TRAIN], seed=seed, name=f"{name} (training split)"),
        heldout=Problems(prompts[Subset.HELDOUT], seed=0, name=f"{name} (held-out split)"),
        max_prompt_length=max_prompt_length,
        num_too_long=num_too_long,
        without_answer=without_answer,
    )


class _Tokens:
    """Tokens of prompts, worked out once for each: DAPO-Math-17k has every prompt a hundred times."""

    def __init__(self, tokenizer: Tokenizer, max_length: int):
        self._tokenizer, self._max_length = tokenizer, max_length
        self._known: dict[str, tuple[int, ...] | None] = {}

    def of(self, row: Row) -> tuple[int, ...] | None:
        """None of a prompt that is too long."""
        key = row.prompt if isinstance(row.prompt, str) else repr(row.prompt)
        if key not in self._known:
            self._known[key] = self._encode(row)
        return self._known[key]

    def _encode(self, row: Row) -> tuple[int, ...] | None:
        if has_more_tokens(flatten_messages(row.prompt), self._max_length):
            return None
        try:
            tokens = tuple(self._tokenizer.encode_prompt(row.prompt))
        except ChatTemplateError as error:
            raise UserError(f"{row.where}: {error}") from None
        return tokens if len(tokens) <= self._max_length else None
