"""Reads files as rows to learn from, each with a prompt and zero, one or two responses.

A schema (`schemas.py`) finds the columns of a file that it needs, and makes a row of each record.
Knows columns by name. Does not know file formats (`row_files.py`), nor tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from pat_jax.common.errors import UserError
from pat_jax.rl.data.chat_turns import as_messages
from pat_jax.rl.data.prompt_columns import ABSENT, lookup
from pat_jax.rl.data.row_files import Record, listed, read_records
from pat_jax.rl.data.row_report import RowReport
from pat_jax.rl.text.tokenizer import ASSISTANT, ChatMessage, PromptText


@dataclass(frozen=True)
class Row:
    """One row as text or chat messages. Without a prompt, responses are whole texts or chats."""

    where: str  # file, line and fields, for messages
    text: str  # the text whose hash decides whether the row is held out
    prompt: PromptText | None
    responses: Sequence[PromptText]  # none for a problem, one for an example, two for a pair
    variables: Mapping[str, Any]  # the row's own variables for the chat template

    def messages(self, response: PromptText) -> Sequence[ChatMessage]:
        return [*as_messages(self.prompt or (), "user"), *as_messages(response, ASSISTANT)]


AnyRow = TypeVar("AnyRow", bound=Row)
AnySchema = TypeVar("AnySchema", bound="Schema")


@dataclass(frozen=True)
class Schema(ABC, Generic[AnyRow]):
    """Finds a file's columns, and makes a row of each record.

    Subclasses have a field for each use of a column, such as prompt or answer. The field holds the
    column's name that the user gives, or "" for the known names. `a.b` is field b of column a.
    """

    ROWS: ClassVar[str]  # the word for rows in messages
    KNOWN: ClassVar[Mapping[str, Sequence[str]]]  # known column names by use; else the use itself
    EXPECTED: ClassVar[str]  # the columns that a file must have, as a clause of messages

    @abstractmethod
    def of_file(self, records: Sequence[Record]) -> "Schema[AnyRow]":
        """Returns the schema with the names of a file's columns. Raises UserError if a column that
        is needed is missing."""

    @abstractmethod
    def row(self, record: Record, report: RowReport) -> AnyRow | None:
        """Returns the row of a record, or None if the row is left out. Raises BadRow if the record
        has a mistake."""

    def found(self: AnySchema, records: Sequence[Record], **known: Sequence[str]) -> AnySchema:
        """Returns the schema with a file's column for each use: the one that the user has named,
        else the first known one that any row has, else "". Raises UserError if no row has a named
        column, or if two uses have the same column."""
        found: dict[str, str] = {}
        names = {**self.KNOWN, **known}
        for use, named in self.named_columns().items():
            column = _find_column(records, named, names.get(use, (use,)), f"data.{use}_key")
            if column and (other := next((o for o in found if found[o] == column), "")):
                raise UserError(
                    f"{records[0].path}: the column {column!r} cannot be both {other} and {use}: expected two "
                    f"columns; name them with --data.{other}_key and --data.{use}_key."
                )
            found[use] = column
        return replace(self, **found)

    def named_columns(self) -> dict[str, str]:
        """Returns the columns that the user has named, by use; "" for the others."""
        return {use: name for use, name in vars(self).items() if isinstance(name, str)}

    def lacking(self, records: Sequence[Record], advice: str) -> UserError:
        """Returns the error for a file without the columns that are needed."""
        return UserError(
            f"{records[0].path} has the columns {listed(_names(records))}: expected {self.EXPECTED}; {advice}."
        )


def read_rows(
    paths: Iterable[Path], schema: Schema[AnyRow], report: RowReport
) -> Iterator[tuple[int, AnyRow]]:
    """Yields every usable row of the files with the number of its line or row, counted on from file
    to file. Raises UserError if a file cannot be used, or a row that may not be left out."""
    before = 0
    for path in paths:
        records = read_records(path, report, of=schema.ROWS)
        of_file = schema.of_file(records)
        for record in records:
            row = None
            with report.row():
                row = of_file.row(record, report)
                report.unread.update(record.unread)
            if row is not None:
                yield before + record.number, row
        before += records[-1].number


def has_columns(records: Sequence[Record], *names: str) -> bool:
    return set(names) <= {name.lower() for name in _names(records)}


def _names(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(name for record in records for name in record.fields))


def _find_column(records: Sequence[Record], named: str, known: Sequence[str], option: str) -> str:
    """Returns the name of the column that is `named`, else of a `known` one, else "". If no column
    has exactly this name, the case of letters does not matter."""
    names = _names(records)
    spelt = {name.lower(): name for name in reversed(names)}
    for key in [named] if named else known:
        key = key if key in names else spelt.get(key, key)
        if any(lookup(record.fields, key) is not ABSENT for record in records):
            return key
    if named:
        raise UserError(
            f"option --{option} is {named!r}: {records[0].path} has the columns {listed(names)}; choose "
            "one of them, or column.field."
        )
    return ""
