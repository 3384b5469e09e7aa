"""Finds the columns of a file by name. Knows names, and the errors of rows without a column."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pat_jax.common.errors import UserError
from pat_jax.common.json_text import has_lone_surrogate
from pat_jax.rl.data.row_files import Record, listed, unpacked
from pat_jax.rl.data.row_report import BadRow, RowReport
from pat_jax.rl.data.template_columns import media_columns, without_nulls
from pat_jax.rl.text.tokenizer import PromptText, is_message

Made = TypeVar("Made")
ABSENT = object()  # the value of a column that a row lacks


def find_column(records: Sequence[Record], named: str, known: Sequence[str], option: str) -> str:
    """Returns the named column, else the first of `known` that any row has, else "".

    Args:
      named: the column's name as the user wrote it, or "". `a.b` is field b of column a. If no
        column has exactly this name, the case of letters does not matter.
      option: the option that names it, such as `data.prompt_key`.

    Raises:
      UserError: no row has the named column.
    """
    names = column_names(records)
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


def check_distinct(path: Path, **columns: str) -> None:
    """Raises UserError if two of these columns, by what they are for, are one; "" is none."""
    found: dict[str, str] = {}
    for use, column in columns.items():
        if column and (other := found.setdefault(column, use)) != use:
            raise UserError(
                f"{path}: the column {column!r} cannot be both {other} and {use}: expected two columns; "
                f"name them with --data.{other}_key and --data.{use}_key."
            )


def column_names(records: Sequence[Record]) -> list[str]:
    """Returns the names of the columns that any row has, in order."""
    return list(dict.fromkeys(name for record in records for name in record.fields))


def lookup(fields: Mapping[str, object], key: str) -> object:
    """Returns a row's value in a column, or `ABSENT`."""
    if key in fields or "." not in key:
        return fields.get(key, ABSENT)
    head, _, rest = key.partition(".")
    inner = unpacked(fields.get(head))
    return lookup(inner, rest) if isinstance(inner, Mapping) else ABSENT


def present(record: Record, key: str) -> object:
    """Returns a row's value in a column that every row must have.

    Raises:
      UserError: the row lacks the column, or its text has half of a character.
    """
    value = lookup(record.fields, key)
    record.read.append(key if key in record.fields else key.partition(".")[0])
    if value is ABSENT:
        raise missing(record, key)
    if has_lone_surrogate(value):
        raise record.complain(key, value, "whole characters, but it has half of one")
    return value


def text_or_chat(record: Record, key: str) -> PromptText:
    """Returns a row's value in a column that must hold a text or chat messages, which may be given
    as JSON text, or as an object of lists (a `Sequence` of `datasets`).

    Raises:
      UserError: the value is missing, empty or of another kind.
    """
    value = present(record, key)
    if (messages := _messages(value)) is not None:
        if not messages or not all(map(is_message, messages)) or has_lone_surrogate(messages):
            raise record.complain(key, value, "chat messages, each with text in role and content")
        return messages
    if not isinstance(value, str) or not value.strip():
        raise record.complain(key, value, "text that is not empty, or a list of chat messages")
    return value


def _messages(value: object) -> list | None:
    """Returns the messages that a value stands for, without nulls; None if it is not a chat."""
    chat = unpacked(value)
    if isinstance(chat, dict) and all(
        isinstance(chat.get(key), list) for key in ("role", "content")
    ):
        chat = [dict(zip(chat, row, strict=False)) for row in zip(*chat.values(), strict=False)]
    if not isinstance(chat, list) or (isinstance(value, str) and not any(map(is_message, chat))):
        return None  # such as a text that happens to be JSON
    found = [without_nulls(unpacked(message)) for message in chat]
    for message in found:
        if isinstance(message, dict) and message.get("tool_calls"):
            message.setdefault("content", "")
    return found


def missing(record: Record, key: str) -> BadRow:
    """Returns the error for a row without a column that others have."""
    return BadRow(
        f"{record.where}, has no field {key!r}, which other rows have (found: "
        f"{listed(record.fields)}); add the field to this row or remove the row."
    )


def refuse_media(record: Record) -> None:
    """Refuses a row with an image, a video or sound. The model would not see it and would make its
    answers up.

    Raises:
      UserError: the row has one.
    """
    for name in media_columns(record.fields):
        raise record.complain(
            name, record.fields[name], "nothing here, because the model reads text alone"
        )


def made(
    make: Callable[[Record], Made], records: Iterable[Record], report: RowReport
) -> Iterator[Made]:
    """Yields what `make` returns for each row that can be used, and counts columns not read."""
    for record in records:
        with report.row():
            row = make(record)
            report.unread.update(record.unread)
            yield row
