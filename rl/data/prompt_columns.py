"""Joins a row's prompt from the columns that belong to it, and separates it from responses.

    prompt, problem, question, messages, instruction, query, input    the first that a file has
    context, passage    text before a problem, question, instruction or query
    input               text behind an instruction, as in Alpaca's rows
    system, system_prompt, system_message    a system message, for prompts that have none

Knows columns and messages. Does not know tokens, nor what is learned.
"""

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from pat_jax.rl.data.chat_turns import as_messages
from pat_jax.rl.data.columns import text_or_chat
from pat_jax.rl.data.row_files import Record, listed
from pat_jax.rl.data.row_report import BadRow
from pat_jax.rl.text.tokenizer import ASSISTANT, PromptText, flatten_messages

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
