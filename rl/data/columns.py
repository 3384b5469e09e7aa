"""Finds the columns of a file by name. Knows names, and the errors of rows without a column."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from pat_jax.common.errors import UserError
from pat_jax.common.json_text import has_lone_surrogate
from pat_jax.rl.data.row_files import NOTHING, Record, listed, unpacked
from pat_jax.rl.data.row_report import BadRow, RowReport
from pat_jax.rl.data.template_columns import MEDIA, without_nulls
from pat_jax.rl.text.tokenizer import PromptText, is_message

Columns = TypeVar("Columns")
Made = TypeVar("Made")
ABSENT = object()  # the value of a column that a row lacks


def find_columns(records: Sequence[Record], named: Columns, **known: Sequence[str]) -> Columns:
    """Returns the columns of a file by what they are for: those that the user has `named`, else the
    first of the known ones that any row has, else "". Known is the use itself, unless others are
    given. Raises UserError if no row has a named column, or if two of them are one."""
    found: dict[str, str] = {}
    for use, name in vars(named).items():
        column = _find_column(records, name, known.get(use, (use,)), f"data.{use}_key")
        if column and (other := next((o for o in found if found[o] == column), "")):
            raise UserError(
                f"{records[0].path}: the column {column!r} cannot be both {other} and {use}: expected two "
                f"columns; name them with --data.{other}_key and --data.{use}_key."
            )
        found[use] = column
    return type(named)(**found)


def _find_column(records: Sequence[Record], named: str, known: Sequence[str], option: str) -> str:
    """`a.b` is field b of column a. If no column has exactly this name, the case of letters does
    not matter."""
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
    """Returns a row's value in a column that every row must have, in whole characters."""
    value = lookup(record.fields, key)
    record.read.append(key if key in record.fields else key.partition(".")[0])
    if value is ABSENT:
        raise missing(record, key)
    if has_lone_surrogate(value):
        raise record.complain(key, value, "whole characters, but it has half of one")
    return value


def text_or_chat(record: Record, key: str, *, unpacks: bool = True) -> PromptText:
    """Returns a row's value in a column that must hold a text or chat messages. An object of lists
    (a `Sequence` of `datasets`) is messages, too, and so is their JSON text, if it is unpacked."""
    value = present(record, key)
    # Only Parquet fills nulls in; elsewhere those inside are meant, such as arguments of a tool.
    plain = without_nulls(value) if record.path.suffix.lower() == ".parquet" else value
    if (unpacks or not isinstance(value, str)) and (messages := _messages(plain)) is not None:
        if not messages or not all(map(is_message, messages)) or has_lone_surrogate(messages):
            raise record.complain(key, value, "chat messages, each with text in role and content")
        return messages
    if not isinstance(value, str) or not value.strip():
        raise record.complain(key, value, "text that is not empty, or a list of chat messages")
    return value


def _messages(value: object) -> list | None:
    """Returns the messages that a value stands for, without null keys; None if it is not a chat."""
    chat = unpacked(value)
    if isinstance(chat, dict) and all(
        isinstance(chat.get(key), list) for key in ("role", "content")
    ):
        chat = [dict(zip(chat, row, strict=False)) for row in zip(*chat.values(), strict=False)]
    if not isinstance(chat, list) or (isinstance(value, str) and not any(map(is_message, chat))):
        return None  # such as a text that happens to be JSON
    found = [unpacked(message) for message in chat]
    for i, message in enumerate(found):
        if isinstance(message, dict):
            empty = {"content": ""} if message.get("tool_calls") else {}
            found[i] = empty | {key: x for key, x in message.items() if x is not None}
    return found


def missing(record: Record, key: str) -> BadRow:
    """Returns the error for a row without a column that others have."""
    return BadRow(
        f"{record.where}, has no field {key!r}, which other rows have (found: "
        f"{listed(record.fields)}); add the field to this row or remove the row."
    )


def refuse_media(record: Record) -> None:
    """Refuses a row with an image, a video or sound. The model would not see it and would make its
    answers up."""
    for name in MEDIA:
        if (value := record.fields.get(name)) not in NOTHING:
            raise record.complain(name, value, "nothing here, because the model reads text alone")


def made(
    make: Callable[[Record], Made], records: Iterable[Record], report: RowReport
) -> Iterator[Made]:
    """Yields what `make` returns for each row that can be used, and counts columns not read."""
    for record in records:
        with report.row():
            row = make(record)
            report.unread.update(record.unread)
            yield row
