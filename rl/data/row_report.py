"""Counts rows that are left out, and rows with columns that are not shown to the model."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from pat_jax.common.errors import UserError
from pat_jax.rl.text.chat_template import ChatTemplateError

# Columns that a prompt often needs; the report names them first.
_TELLING = ("choices", "options", "choice", "history", "conversations", "documents")
BadRows = Literal["", "refuse", "skip"]  # "": refuse them, without an option to skip them


class BadRow(UserError):
    """A mistake in one row; the other rows can be used."""


@dataclass
class RowReport:
    bad_rows: BadRows = ""
    bad: list[str] = field(default_factory=list)  # a sentence for each row left out
    without_answer: list[str] = field(default_factory=list)  # file and line of unanswered problems
    num_repeating: int = 0  # rows whose responses began with their prompt, which was taken off
    unread: Counter[str] = field(default_factory=Counter)  # rows with a value, by column

    @contextmanager
    def row(self, where: str = "") -> Iterator[None]:
        """Reports a row's error that is raised in the `with` block, or raises UserError."""
        try:
            yield
        except (BadRow, ChatTemplateError) as error:
            sentence = str(error).removesuffix(".")
            if isinstance(error, ChatTemplateError):
                sentence = f"{where}: {sentence}"
            if self.bad_rows != "skip":
                hint = "; --data.bad_rows skip leaves such rows out" if self.bad_rows else ""
                raise UserError(f"{sentence}{hint}.") from None
            self.bad.append(sentence)

    def __str__(self) -> str:
        """The report as clauses that continue a sentence; "" if there is nothing to report."""
        text = ""
        if self.bad:
            text += f"; bad rows left out: {len(self.bad):,} (the first: {self.bad[0]})"
        if self.num_repeating:
            text += f"; prompts that responses repeat, taken once: in {self.num_repeating:,} rows"
        if self.unread:
            most = sorted(self.unread.most_common(), key=lambda one: one[0].lower() not in _TELLING)
            names = (f"{name[:40]} ({count:,} rows)" for name, count in most[:20])
            more = f" and {len(self.unread) - 20} more" if len(self.unread) > 20 else ""
            text += f"; not shown to the model: {', '.join(names)}{more}"
        return text
