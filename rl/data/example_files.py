"""Reads examples of supervised fine-tuning from files, by these columns:

    prompt + completion    text or chat messages, each; with the columns of `prompt_columns.py`
    messages               a chat
    text                   a text, like a whole text file (`text_files.py`)

The first that a file has counts; case does not matter. Knows columns and what may be in them: every
error names file, line or row, and field. Does not know file formats (`row_files.py`), nor tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pat_jax.common.errors import UserError
from pat_jax.rl.data.chat_turns import as_messages
from pat_jax.rl.data.columns import (
    column_names,
    find_columns,
    made,
    present,
    refuse_media,
    text_or_chat,
)
from pat_jax.rl.data.prompt_columns import PROMPT_TEXTS, read_prompt, with_system, without_prompt
from pat_jax.rl.data.row_files import Record, listed, read_records
from pat_jax.rl.data.row_report import RowReport
from pat_jax.rl.text.tokenizer import ASSISTANT, ChatMessage, PromptText, flatten_messages


@dataclass(frozen=True)
class ExampleColumns:
    """Names of the columns; `a.b` is field b of column a. Empty: the field's own name."""

    prompt: str = ""
    completion: str = ""
    messages: str = ""
    text: str = ""

    @property
    def named(self) -> list[str]:
        """The fields for which the user has named a column."""
        return [name for name, column in asdict(self).items() if column]


@dataclass(frozen=True)
class Completion:
    """A prompt and the completion to generate after it."""

    where: str  # file, line and field
    prompt: PromptText
    completion: PromptText
    variables: Mapping[str, Any]  # of the chat template, besides those of every chat

    @property
    def messages(self) -> Sequence[ChatMessage]:
        return [*as_messages(self.prompt, "user"), *as_messages(self.completion, ASSISTANT)]

    @property
    def text(self) -> str:
        """The text whose hash decides whether the example is held out: the prompt's."""
        return flatten_messages(self.prompt)


@dataclass(frozen=True)
class Conversation:
    where: str
    messages: Sequence[ChatMessage]  # at least one of them the assistant's
    variables: Mapping[str, Any]  # of the chat template, besides those of every chat

    @property
    def text(self) -> str:
        return flatten_messages(self.messages)


@dataclass(frozen=True)
class PlainText:
    where: str
    text: str


ExampleRow = Completion | Conversation | PlainText


def read_example_file(
    path: Path, columns: ExampleColumns | None = None, report: RowReport | None = None
) -> list[ExampleRow]:
    """Returns every row of the file that can be used; `columns` are those that the user has named.
    Raises UserError if the file, or a row that may not be left out, cannot be used."""
    report = report or RowReport()
    records, named = read_records(path, report), columns or ExampleColumns()
    found = find_columns(records, named)
    if named.completion or not (found.messages or found.text):  # else they tell more
        found = find_columns(records, named, prompt=PROMPT_TEXTS)
    if found.prompt and found.completion:
        row = partial(_completion, report, found.prompt, found.completion)
    elif found.messages:
        row = partial(_conversation, found.messages)
    elif found.text:
        row = partial(_plain_text, found.text)
    else:
        raise UserError(_no_example(path, column_names(records)))
    return list(made(row, records, report))


def _no_example(path: Path, names: Sequence[str]) -> str:
    """The sentence for a file whose columns hold no example."""
    what = (
        f"{path} has the columns {listed(names)}: expected prompt and completion, messages, or text"
    )
    if {"chosen", "rejected"} <= {name.lower() for name in names}:
        return f"{what}; a policy learns from pairs with --loss dpo."
    return (
        f"{what}; name your columns with --data.prompt_key and --data.completion_key, "
        "--data.messages_key or --data.text_key."
    )


def _where(record: Record, key: str) -> str:
    return f"{record.where}, field {key!r}"


def _completion(
    report: RowReport, prompt_key: str, completion_key: str, record: Record
) -> Completion:
    refuse_media(record)
    prompt = read_prompt(record, prompt_key, is_answered=True)
    completion = text_or_chat(record, completion_key, unpacks=not isinstance(prompt, str))
    if not isinstance(completion, str) and completion[0]["role"] != ASSISTANT:
        raise record.complain(completion_key, completion, "a first message of the assistant")
    (rest,) = without_prompt(prompt, [completion])
    report.num_repeating += rest is not completion
    prompt, variables = with_system(record, prompt), record.template_variables()
    return Completion(_where(record, completion_key), prompt, rest, variables)


def _conversation(key: str, record: Record) -> Conversation:
    refuse_media(record)
    messages = text_or_chat(record, key)
    if isinstance(messages, str):
        raise record.complain(key, messages, "a list of chat messages")
    messages = as_messages(with_system(record, messages), "user")
    if not any(message["role"] == ASSISTANT for message in messages):
        raise record.complain(key, messages, "at least one message of the assistant to learn from")
    return Conversation(_where(record, key), messages, record.template_variables())


def _plain_text(key: str, record: Record) -> PlainText:
    refuse_media(record)
    value = present(record, key)
    if not isinstance(value, str) or not value.strip():
        raise record.complain(key, value, "text that is not empty")
    return PlainText(_where(record, key), value)
