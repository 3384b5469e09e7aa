"""Which column of a file holds what. Knows names, and what to say of a row without."""

from collections.abc import Mapping, Sequence

from pat_jax.common.errors import UserError
from pat_jax.common.json_text import has_lone_surrogate
from pat_jax.rl.data.row_files import Record, listed
from pat_jax.rl.text.tokenizer import PromptText, is_message

ABSENT = object()  # what a row has in a column that it has not


def find_column(records: Sequence[Record], named: str, known: Sequence[str], option: str) -> str:
    """The column that is named, or the first that is known and that any row has, or none ("").

    Args:
      named: as somebody has written it; `a.b` is field b of column a, and the case of letters does
        not matter where no column is spelt so.
      option: where it was written, as `data.prompt_key`.

    Raises:
      UserError: no row has the column that is named.
    """
    names = column_names(records)
    spelt = {name.lower(): name for name in reversed(names)}
    for key in [named] if named else known:
        key = key if key in names else spelt.get(key, key)
        if any(lookup(record.fields, key) is not ABSENT for record in records):
            return key
    if named:
        raise UserError(
            f"option --{option} is {named!r}: {records[0].path} has the columns {listed(names)}; give "
            "one of them, or column.field."
        )
    return ""


def column_names(records: Sequence[Record]) -> list[str]:
    """Those that any row has, in their order."""
    return list(dict.fromkeys(name for record in records for name in record.fields))


def lookup(fields: Mapping[str, object], key: str) -> object:
    """What a row has there, or `ABSENT`."""
    if key in fields or "." not in key:
        return fields.get(key, ABSENT)
    head, _, rest = key.partition(".")
    inner = fields.get(head)
    return lookup(inner, rest) if isinstance(inner, Mapping) else ABSENT


def present(record: Record, key: str) -> object:
    """What a row has in a column that others have.

    Raises:
      UserError: it has nothing there, or text that nobody can read.
    """
    value = lookup(record.fields, key)
    if value is ABSENT:
        raise missing(record, key)
    if has_lone_surrogate(value):
        raise record.complain(key, value, "whole characters, but it has half of one")
    return value


def text_or_chat(record: Record, key: str) -> PromptText:
    """What a row has there, which is to be a text or chat messages."""
    value = present(record, key)
    if isinstance(value, list):
        check_messages(record, key, value)
        return value
    if not isinstance(value, str) or not value.strip():
        raise record.complain(key, value, "text that is not empty, or a list of chat messages")
    return value


def check_messages(record: Record, key: str, value: list) -> None:
    if not value or not all(map(is_message, value)):
        raise record.complain(key, value, "chat messages, each with text in role and content")


def missing(record: Record, key: str) -> UserError:
    """The error for a row without the column that others have."""
    return UserError(
        f"{record.where}, has no field {key!r}, which other rows have (found: "
        f"{listed(record.fields)}); add the field to this row or remove the row."
    )
