"""Decides which prompts each iteration trains on, and which are held out.

Knows prompts and splits. Does not know file formats, columns (`schemas.py`), rewards, or the order
of an epoch (`epochs.py`). The built-in task (`arithmetic.py`) has the same `draw` and `first`.
"""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pat_jax.common.errors import UserError
from pat_jax.rl.batches.types import Prompt
from pat_jax.rl.data.chat_turns import unread_keys
from pat_jax.rl.data.epochs import Cursor, Epochs
from pat_jax.rl.data.row_report import BadRows, RowReport
from pat_jax.rl.data.rows import read_rows
from pat_jax.rl.data.schemas import ProblemRow, ProblemSchema
from pat_jax.rl.data.splits import A_LIMIT, Splits, has_more_tokens
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer, Tokenizer, flatten_messages

HELDOUT_SHARE = 0.1


class Problems:
    """A fixed set of prompts, in a new random order every epoch (`Epochs`).

    No batch holds a prompt twice, unless it is larger than the number of different prompts.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, name: str):
        self.name = name  # name of the set in messages
        self._prompts = tuple(prompts)
        self._epochs = Epochs([(prompt.text, prompt.tokens) for prompt in prompts], seed=seed)

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]

    @property
    def num_different(self) -> int:
        """Number of different prompts."""
        return self._epochs.num_different

    def draw(self, at: Cursor, size: int) -> tuple[list[Prompt], Cursor]:
        """Returns the `size` prompts from position `at` on, and the position of the next batch: a
        pure function. Raises UserError if there are fewer than `size` prompts."""
        if size > len(self):
            raise UserError(
                f"{self.name} has {len(self)} prompts, fewer than one batch of {size}: expected at "
                "least as many; use more data, smaller batches, or a longer "
                "--rollout.max_prompt_length if prompts were filtered out."
            )
        rows, after = self._epochs.draw(at, size)
        return [self._prompts[row] for row in rows], after

    def epochs(self, at: Cursor) -> float:
        """Returns the number of passes over the prompts before `at`."""
        return at.epoch + min(1.0, at.offset / len(self))

    def first(self, count: int) -> list[Prompt]:
        """Returns up to `count` prompts, always the same ones, for evaluations."""
        return [self._prompts[row] for row in self._epochs.order(0)[:count]]

    @property
    def checksum(self) -> int:
        return checksum_of(self._prompts)


def checksum_of(prompts: Iterable[Prompt]) -> int:
    """Returns the CRC-32 of prompts and the columns that rewards are given, in order."""
    found = 0
    for prompt in prompts:
        whole = prompt.text, prompt.tokens, sorted(prompt.columns.items())
        found = zlib.crc32(repr(whole).encode("utf-8", "surrogatepass"), found)
    return found


class _Read(Splits[Prompt]):
    NAME = "problems"

    @property
    def unusable(self) -> str:
        places = self.report.without_answer
        return f", {len(places):,} without an answer (the first: {places[0]})" if places else ""


@dataclass(frozen=True)
class ProblemSplits:
    train: Problems
    heldout: Problems
    read: Splits[Prompt]

    def __str__(self) -> str:
        sets = {"to train on": self.train, "held out": self.heldout}
        counts = (_count(one, what) for what, one in sets.items() if len(one))
        return f"problems: {', '.join(counts) or 'none'}; {self.read.left_out}"


def _count(problems: Problems, what: str) -> str:
    repeated = len(problems) - problems.num_different
    again = f" ({repeated:,} repeat another's prompt)" if repeated else ""
    return f"{len(problems):,} {what}{again}"


def load_problems(
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    *,
    seed: int,
    max_prompt_length: int,
    heldout_share: float = HELDOUT_SHARE,
    schema: ProblemSchema | None = None,
    bad_rows: BadRows = "",
    option: str = A_LIMIT,
) -> ProblemSplits:
    """Reads, tokenises, filters and splits files of problems.

    A prompt's id is its line or row number, counted on from file to file. The problem's text
    determines its split, and the held-out set has a fixed order: neither depends on `seed`.
    `option` names, in messages, the option that sets `max_prompt_length`. Raises UserError if a
    file or one of its rows cannot be used.
    """
    report = RowReport(bad_rows)
    found = _Read(max_prompt_length, option, report)
    tokens = _Tokens(tokenizer, max_prompt_length)
    for number, row in read_rows(paths, schema or ProblemSchema(), report):
        with report.row(row.where):
            if not isinstance(of_prompt := tokens.of(row), tuple):
                found.too_long.append(of_prompt)
                continue
            messages = () if isinstance(row.prompt, str) else row.prompt
            if isinstance(tokenizer, HuggingFaceTokenizer):
                report.unread.update(unread_keys(tokenizer, row.variables, messages))
            text = flatten_messages(row.prompt)
            prompt = Prompt(number, of_prompt, text, row.columns, messages)
            found.add(prompt, row.text, heldout_share)
    name = f"{paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''}"
    train = Problems(found.train, seed=seed, name=f"{name} (training split)")
    return ProblemSplits(
        train, Problems(found.heldout, seed=0, name=f"{name} (held-out split)"), found
    )


class _Tokens:
    """Tokenizes equal prompts once: DAPO-Math-17k repeats every prompt a hundred times."""

    def __init__(self, tokenizer: Tokenizer, max_length: int):
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._known: dict[str, tuple[int, ...] | int | None] = {}

    def of(self, row: ProblemRow) -> tuple[int, ...] | int | None:
        """Returns a prompt's tokens. If it is too long, returns its length, or None if unknown."""
        if isinstance(row.prompt, str) and not row.variables:
            key = row.prompt
        else:
            key = repr((row.prompt, row.variables))
        if key not in self._known:
            self._known[key] = self._encode(row)
        return self._known[key]

    def _encode(self, row: ProblemRow) -> tuple[int, ...] | int | None:
        if has_more_tokens(flatten_messages(row.prompt), self._max_length):
            return None
        tokens = tuple(self._tokenizer.encode_prompt(row.prompt, row.variables))
        return tokens if len(tokens) <= self._max_length else len(tokens)
