"""Joins a row's prompt from the columns that belong to it, and separates it from responses.

Reads the values of columns: it knows which are valid, and the errors for others.

    prompt, problem, question, messages, instruction, query, input    the first that a file has
    context, passage    text before a problem, question, instruction or query
    input               text behind an instruction, as in Alpaca's rows
    system, system_prompt, system_message    a system message, for prompts that have none

Knows columns and messages. Does not know tokens, nor what is learned.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from pat_jax.common.json_text import has_lone_surrogate
from pat_jax.rl.data.chat_turns import as_messages
from pat_jax.rl.data.row_files import NOTHING, Record, listed, unpacked
from pat_jax.rl.data.row_report import BadRow
from pat_jax.rl.data.template_columns import MEDIA, without_nulls
from pat_jax.rl.text.tokenizer import ASSISTANT, PromptText, flatten_messages, is_message

ABSENT = object()  # the value of a column that a row lacks
PROMPTS = ("prompt", "problem", "question", "messages", "instruction", "query", "input")
PROMPT_TEXTS = tuple(name for name in PROMPTS if name != "messages")
_BARE = ("problem", "question", "instruction", "query")
# How a plain text marks who speaks: "Human:", "### Response:", "<|user|>", "[/INST]".
_MARK = r"[ *|]*[:：<>\]\n]"
_ANSWERER = rf"\W(?:assistant|answer|response|output|model|gpt|bot|ai|a|/inst|答案?|助手){_MARK}"
_ASKER = rf"(?<!\w)(?:human|user|question|instruction|input|inst|q|问题?|用户){_MARK}"
_DIALOGUE = re.compile(f"{_ASKER}.*{_ANSWERER}", re.IGNORECASE | re.DOTALL)
_GOES_ON = re.compile(rf"\s*\n|\W*?{_ANSWERER}", re.IGNORECASE)
_LETTERS = "[^\\W\u3040-\uffff]+"  # a word, in scripts that put spaces between words
_WORDS = re.compile(rf"{_LETTERS}|[\u3040-\uffff]{{1,2}}|[^\w\s]")
_SYSTEM = ("system", "system_prompt", "system_message")


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


def read_prompt(record: Record, key: str, *, is_answered: bool = False) -> PromptText:
    """Returns a row's prompt, with the other texts that belong to it. If the row has a response
    (`is_answered`), the prompt may not end with a message of the assistant."""
    prompt = text_or_chat(record, key)
    name = key.rpartition(".")[2].lower()
    if is_answered and not isinstance(prompt, str) and prompt[-1]["role"] == ASSISTANT:
        expected = "a last message that the assistant answers, not one of its own"
        raise record.complain(key, prompt, expected)
    if isinstance(prompt, str) and name in _BARE:
        if before := _text(record, ("context", "passage")):
            prompt = f"{before}\n\n{prompt}"
        if name == "instruction" and (behind := _text(record, ("input",))):
            prompt = f"{prompt}\n{behind}"
    return prompt


def with_system(record: Record, prompt: PromptText, given: PromptText = "") -> PromptText:
    """Returns the prompt with a system message at its beginning: its own, else that of the prompt
    `given`, else the row's. Without any of them, returns the prompt unchanged."""
    first, other = (as_messages(each, "user")[0] for each in (prompt, given))
    own, text = (each["content"] if each["role"] == "system" else "" for each in (first, other))
    text = text or _text(record, _SYSTEM, within=own)
    if own or not text:
        return prompt
    return [{"role": "system", "content": text}, *as_messages(prompt, "user")]


def without_prompt(prompt: PromptText, responses: Sequence[PromptText]) -> Sequence[PromptText]:
    """Returns the responses without the prompt, if all begin with a plain copy of it, else
    unchanged. First words in common are not a copy (`A` and `A good answer`)."""
    asked = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    chats = [as_messages(each, ASSISTANT) for each in responses]
    rests = [_rest(asked, chat[0]["content"], is_only=len(chats) == 1) for chat in chats]
    found = zip(responses, chats, rests, strict=True)
    if not all(map(str.strip, rests)):
        return responses
    return [x if isinstance(a, str) else [{**b[0], "content": x}, *b[1:]] for a, b, x in found]


def _rest(asked: str, text: str, *, is_only: bool) -> str:
    *words, last = asked.split() or [""]
    *before, rest = text.split(None, len(words)) or [""]  # with any spaces
    if before != words or not rest.startswith(last):
        return ""
    rest = rest.removeprefix(last)
    is_apart = re.search(r"[^\w\s]$", last) or not (is_only or re.match(r"\w", rest))
    is_copy = is_apart and len(_WORDS.findall(asked)) > 3
    return rest if is_copy or _GOES_ON.match(rest) else ""


def _text(record: Record, names: Sequence[str], within: str = "") -> str:
    """Returns the text of the first of these columns that has one and is not yet read, or "". Only
    texts that are a part of `within` count, if it is given."""
    for name in record.unread:
        value = record.fields[name]
        if name.lower() not in names or not isinstance(value, str) or not value.strip():
            continue
        if not within or value.strip() in within:
            record.read.append(name)
            return value
    return ""


class Split(NamedTuple):
    prompt: PromptText | None  # None if the responses are whole texts
    responses: Sequence[PromptText]  # the rest of either text after the prompt
    is_shown: bool  # whether prompt and responses contain the text of the prompt's column


def split_pair(
    where: str,
    record: Record,
    given: PromptText | None,
    chosen: PromptText,
    rejected: PromptText,
    *,
    is_guessed: bool,
) -> Split:
    """Separates a pair's prompt: that `given` by its column, or the common beginning of both texts.
    If `is_guessed`, the column has a usual name other than `prompt`, such as `question`."""
    asked = flatten_messages(as_messages(given or "", "user")[-1:]).strip()
    answers = without_prompt(given or "", whole := (chosen, rejected))
    if isinstance(chosen, str) or isinstance(rejected, str):
        both = str(chosen)[: num_shared(chosen, rejected)]
        is_copy = answers is whole and _DIALOGUE.search(both) and (is_guessed or asked in both)
        if is_copy if given else re.sub(f"{_LETTERS}$", "", both).strip():
            return Split(None, whole, asked in both)
    elif not given or not chosen[0]["role"] == rejected[0]["role"] == ASSISTANT:
        # Whole chats. If there is a prompt as well, it is a copy of their beginning.
        one, other = (
            [(x["role"], x["content"], x.get("tool_calls")) for x in chat[:-1]]
            for chat in (chosen, rejected)
        )
        shared = num_shared(one, other)
        prompt = chosen[:shared]
        later = (chosen[shared:], rejected[shared:])
        if shared and all(each[0]["role"] == ASSISTANT for each in later):
            return Split(prompt, later, asked in flatten_messages(prompt))
        given = None
    if given is None:
        raise BadRow(
            f"{where}, begin with no prompt in common, and no column is known to hold it (there are "
            f"{listed(record.fields)}): expected two responses to one prompt; name its column with "
            "--data.prompt_key."
        )
    return Split(given, answers, True)


def num_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Returns the number of elements at the beginning that two sequences have in common."""
    both = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
