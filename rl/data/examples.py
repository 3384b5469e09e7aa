"""Examples of supervised fine-tuning, as tokens: which tokens are learned, and in which order.

Knows rows, tokens, splits and epochs. Does not know file formats (`example_files.py`,
`text_files.py`), batches or shapes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import chain
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import numpy as np

from pat_jax.common.errors import UserError
from pat_jax.rl.data.chat_turns import (
    Marked,
    Piece,
    as_messages,
    ended,
    join_pieces,
    mark_turns,
    unread_keys,
)
from pat_jax.rl.data.example import Example
from pat_jax.rl.data.example_files import (
    Completion,
    Conversation,
    ExampleColumns,
    ExampleRow,
    PlainText,
    read_example_file,
)
from pat_jax.rl.data.limits import A_LIMIT, keeps_most, kept
from pat_jax.rl.data.pair import Pair
from pat_jax.rl.data.row_files import RECORD_FORMATS
from pat_jax.rl.data.row_report import BadRows, RowReport
from pat_jax.rl.data.subset import Subset, subset_of
from pat_jax.rl.data.text_files import is_text_file, read_text_file
from pat_jax.rl.data.text_reader import TextRead, TextReader
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer, flatten_messages

Each = TypeVar("Each", bound=Example | Pair)


class Examples(Generic[Each]):
    """A fixed set of examples, or of pairs. Every epoch has each of them once, in a new random
    order."""

    def __init__(self, examples: Sequence[Each], *, seed: int):
        self._examples, self._seed = examples, seed

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Each:
        return self._examples[index]

    def draw(self, position: int, size: int) -> list[Each]:
        """Returns the next `size` examples after `position` examples have been drawn.

        This is a pure function. The last batch of an epoch may be smaller: no batch reaches into
        the next epoch.
        """
        epoch, start = divmod(position, len(self))
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self))
        return [self._examples[index] for index in order[start : start + size].tolist()]

    @cached_property
    def checksum(self) -> int:
        """CRC-32 of the examples' tokens and of which are learned, in order."""
        return reduce(lambda found, each: each.checksum(found), self._examples, 0)

    def batches_per_epoch(self, size: int) -> int:
        return -(-len(self) // size)


@dataclass
class Read(Generic[Each]):
    """The examples or pairs read from files."""

    max_length: int
    option: str  # name of the option that sets `max_length`
    report: RowReport
    is_truncated: bool = False
    train: list[Each] = field(default_factory=list)
    heldout: list[Each] = field(default_factory=list)
    too_long: list[int] = field(default_factory=list)  # lengths of those left out, or cut
    num_unlearned: int = 0  # left out: no token is learned, in what a cut leaves

    NAME: ClassVar = "examples"
    TOO_LONG: ClassVar = "{:,} longer than {:,} tokens"

    def __str__(self) -> str:
        return f"{self.NAME}: {kept(self.train, self.heldout)}; {self.left_out}"

    def add(self, each: Each, text: str, heldout_share: float) -> None:
        """Adds an example to the subset that its row's text decides."""
        is_train = subset_of(text, heldout_share) is Subset.TRAIN
        (self.train if is_train else self.heldout).append(each)

    @property
    def left_out(self) -> str:
        """How many were left out or cut and why, in words."""
        what = self.TOO_LONG.format(len(self.too_long), self.max_length)
        if self.is_truncated:
            cut = f"{self.num_unlearned:,} cut before what is learned"
            return f"cut: {what}; left out: {cut}{self.report}"
        hint = keeps_most(len(self.train) + len(self.heldout), self.too_long, self.option)
        none = f", {self.num_unlearned:,} with nothing to learn" if self.num_unlearned else ""
        return f"left out: {what}{hint}{none}{self.report}"


@dataclass(frozen=True)
class ExampleReader:
    """Reads files as examples, or as rows of text.

    Args:
      max_length: most tokens of an example; longer ones are left out, or cut if `is_truncated`.
        Rows of text have this many tokens.
      completion_only: learn the completion and not the prompt.
      assistant_only: in a chat, learn only the assistant's tokens.
      option: name of the option that sets `max_length`, for messages.
      bad_rows: see `RowReport`.
    """

    tokenizer: HuggingFaceTokenizer
    max_length: int
    is_truncated: bool = False
    columns: ExampleColumns | None = None
    completion_only: bool = True
    assistant_only: bool = True
    option: str = A_LIMIT
    bad_rows: BadRows = ""

    def read(self, paths: Sequence[Path], heldout_share: float) -> Read[Example] | TextRead:
        """Reads all files, and holds out a share of the rows. The text of a prompt, a chat or a
        text alone decides it; order and seed do not matter. Raises UserError if a file or one of
        its rows cannot be used, or if some rows are texts and some not."""
        report = RowReport(self.bad_rows)
        found = Read[Example](self.max_length, self.option, report, self.is_truncated)
        texts = TextReader(self.tokenizer, heldout_share)
        forms = dict[bool, str]()  # where a text is, and where something else
        for row in chain.from_iterable(self._rows(path, report) for path in paths):
            forms.setdefault(isinstance(row, PlainText), row.where)
            with report.row(row.where):
                if isinstance(row, PlainText):
                    texts.add(row.text)
                elif (example := self._example(row, found)) is not None:
                    found.add(example, row.text, heldout_share)
        if len(forms) == 2:
            raise UserError(
                f"{forms[True]}, is plain text, but {forms[False]}, is an example: expected only one of the two, "
                "because plain text is cut into rows and examples are not; train on one after the other."
            )
        return replace(texts.result(self.max_length), report=report) if True in forms else found

    def _rows(self, path: Path, report: RowReport) -> Sequence[ExampleRow]:
        if not is_text_file(path):
            return read_example_file(path, self.columns, report)
        if self.columns and (named := self.columns.named):
            raise UserError(
                f"option --data.{named[0]}_key names a column, but {path} is plain text without columns: "
                f"expected {', '.join(RECORD_FORMATS)}; leave out the option or the file."
            )
        return [PlainText(str(path), read_text_file(path))]

    def _example(self, row: Completion | Conversation, found: Read) -> Example | None:
        """Returns a row's example; None if it is left out, and counts it in `found`."""
        tokens, is_learned = self.marked(row)
        found.report.unread.update(unread_keys(self.tokenizer, row.variables, row.messages))
        if len(tokens) > self.max_length:
            found.too_long.append(len(tokens))
            if not self.is_truncated:
                return None
        in_loss = np.array(is_learned[: self.max_length])
        in_loss[0] = False
        if not in_loss.any():
            found.num_unlearned += 1
            return None
        return Example(np.array(tokens[: self.max_length], np.int32), in_loss)

    def marked(self, row: Completion | Conversation) -> Marked:
        """Returns a row's tokens, and which are learned. Raises UserError if the row is a chat and
        there is no chat template, and ChatTemplateError if the template cannot render it."""
        match row:
            case Conversation():
                return self._of_chat(row, 0, only=self.assistant_only)
            case Completion(completion=str(completion)) if not self.tokenizer.has_chat_template:
                self.tokenizer.check_template(row.variables)
                prompt = flatten_messages(row.prompt)
                pieces = [Piece(prompt, not self.completion_only), Piece(completion, True)]
                joined = join_pieces(pieces, self.tokenizer.encode_text, self.tokenizer.encode)
                return ended(joined, self.tokenizer.eos_ids)
            case Completion():
                before = len(as_messages(row.prompt, "user"))
                return self._of_chat(row, before, only=self.completion_only)

    def _of_chat(self, row: Completion | Conversation, first: int, *, only: bool) -> Marked:
        check_has_template(self.tokenizer, row.where)
        return mark_turns(self.tokenizer, row.messages, first, row.variables, only=only)


def check_has_template(tokenizer: HuggingFaceTokenizer, where: str) -> None:
    """Raises UserError for the chat at `where` if the tokenizer has no chat template."""
    if not tokenizer.has_chat_template:
        raise UserError(
            f"{where}, is a chat, but {tokenizer.directory} has no chat template: expected "
            "prompt and completion as text; give such rows, or a checkpoint with a template."
        )
