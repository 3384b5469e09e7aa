"""Reads the values of a row's columns. Knows which values are valid, and the errors for others."""

from collections.abc import Mapping

from pat_jax.common.json_text import has_lone_surrogate
from pat_jax.rl.data.row_files import NOTHING, Record, listed, unpacked
from pat_jax.rl.data.row_report import BadRow
from pat_jax.rl.data.template_columns import MEDIA, without_nulls
from pat_jax.rl.text.tokenizer import PromptText, is_message

ABSENT = object()  # the value of a column that a row lacks


def lookup(fields: Mapping[str, object], key: str) -> object:
    """Returns a row's value in a column, or `ABSENT`. The key `a.b` is field b of column a."""
    if key in fields or "." not in key:
        return fields.get(key, ABSENT)
    head, _, rest = key.partition(".")
    inner = unpacked(fields.get(head))
    return lookup(inner, rest) if isinstance(inner, Mapping) else ABSENT


def present(record: Record, key: str) -> object:
    """Returns a row's value in a column. Raises BadRow if it is missing or has a lone surrogate."""
    value = lookup(record.fields, key)
    record.read.append(key if key in record.fields else key.partition(".")[0])
    if value is ABSENT:
        raise missing(record, key)
    if has_lone_surrogate(value):
        raise record.complain(key, value, "whole characters, but it has half of one")
    return value


def text_or_chat(record: Record, key: str, *, unpacks: bool = True) -> PromptText:
    """Returns a row's value in a column that must hold a text or chat messages. An object of lists
    (a `Sequence` of `datasets`) counts as messages; so does JSON text of messages, if `unpacks`."""
    value = present(record, key)
    # Only Parquet fills nulls in; in other files, inner nulls are meant, as in a tool's arguments.
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
    """Raises BadRow for a row with an image, a video or sound, which the model would not see."""
    for name in MEDIA:
        if (value := record.fields.get(name)) not in NOTHING:
            raise record.complain(name, value, "nothing here, because the model reads text alone")
