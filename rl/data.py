"""Problems in order: which prompts each iteration trains on, and which are held out.

Knows prompts, splits and epochs. Does not know file formats (`problem_files.py`) or rewards. The
built-in task (`arithmetic.py`) has the same `batch` and `first`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from pat_jax.errors import UserError
from pat_jax.rl.problem_files import INSTRUCTION, Row, read_problem_file
from pat_jax.rl.split import Split, split_of
from pat_jax.rl.tokenizer import Tokenizer, flatten_messages
from pat_jax.rl.types import Prompt

HELDOUT_SHARE = 0.1


@runtime_checkable  # for the type checks of the tests
class PromptSource(Protocol):
    """Where an iteration's prompts come from; the position in the data is the iteration's index."""

    def batch(self, step: int, size: int) -> list[Prompt]:
        """The `size` different prompts of iteration `step`: a pure function."""
        ...

    def first(self, count: int) -> list[Prompt]:
        """Up to `count` prompts, always the same ones: what evaluations use."""
        ...


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
        if size > len(self):
            raise UserError(
                f"{self.name} has {len(self)} prompts, fewer than one batch of {size}: expected at "
                "least as many; use more data, smaller batches, or a longer "
                "--rollout.max_prompt_length if prompts were filtered out."
            )
        epoch, position = divmod(step, len(self) // size)
        order = self._order(epoch)
        return [self._prompts[index] for index in order[position * size : (position + 1) * size]]

    def first(self, count: int) -> list[Prompt]:
        return [self._prompts[index] for index in self._order(0)[:count]]

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self._seed, epoch)).permutation(len(self))


@dataclass(frozen=True)
class ProblemSplits:
    train: Problems
    heldout: Problems
    max_prompt_length: int
    num_too_long: int
    num_without_answer: int

    def __str__(self) -> str:
        return (
            f"{len(self.train)} problems to train on, {len(self.heldout)} held out; left out: "
            f"{self.num_too_long} longer than {self.max_prompt_length} tokens, "
            f"{self.num_without_answer} without an answer"
        )


def load_problems(
    path: str | Path,
    tokenizer: Tokenizer,
    *,
    seed: int,
    max_prompt_length: int,
    heldout_share: float = HELDOUT_SHARE,
    instruction: str = INSTRUCTION,
) -> ProblemSplits:
    """Reads, tokenises, filters and splits a file of problems.

    A prompt's id is its line or row number in the file. The split follows from the problem's text
    and the order of the held-out set is fixed: neither depends on `seed`.
    """
    file = read_problem_file(path, instruction=instruction)
    prompts: dict[Split, list[Prompt]] = {Split.TRAIN: [], Split.HELDOUT: []}
    num_too_long = 0
    for row in file.rows:
        prompt = _to_prompt(row, tokenizer)
        if len(prompt.tokens) > max_prompt_length:
            num_too_long += 1
        else:
            prompts[split_of(row.text, heldout_share)].append(prompt)
    splits = ProblemSplits(
        train=Problems(prompts[Split.TRAIN], seed=seed, name=f"{path} (training split)"),
        heldout=Problems(prompts[Split.HELDOUT], seed=0, name=f"{path} (held-out split)"),
        max_prompt_length=max_prompt_length,
        num_too_long=num_too_long,
        num_without_answer=file.num_without_answer,
    )
    if not len(splits.train):
        raise UserError(
            f"{path} leaves nothing to train on ({splits}): expected some problems; raise "
            "--rollout.max_prompt_length or use more data."
        )
    return splits


def _to_prompt(row: Row, tokenizer: Tokenizer) -> Prompt:
    return Prompt(
        id=row.number,
        tokens=tuple(tokenizer.encode_prompt(row.prompt)),
        text=flatten_messages(row.prompt),
        columns=row.columns,
    )
