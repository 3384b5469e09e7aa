"""Puts a row's prompt together from the columns that belong to it.

    prompt, problem, question, messages, instruction, query, input    the first that a file has
    context, passage    text before a problem, question, instruction or query
    input               text behind an instruction, as in Alpaca's rows
    system, system_prompt, system_message    a system message, for prompts that have none

Knows columns and messages. Does not know tokens, nor what is learned.
"""

from collections.abc import Sequence

from pat_jax.rl.data.chat_turns import as_messages
from pat_jax.rl.data.columns import text_or_chat
from pat_jax.rl.data.row_files import Record
from pat_jax.rl.text.tokenizer import ASSISTANT, PromptText

PROMPTS = ("prompt", "problem", "question", "messages", "instruction", "query", "input")
PROMPT_TEXTS = tuple(name for name in PROMPTS if name != "messages")
_BARE = ("problem", "question", "instruction", "query")
_SYSTEM = ("system", "system_prompt", "system_message")


def read_prompt(record: Record, key: str, *, is_answered: bool = False) -> PromptText:
    """Returns a row's prompt, with the other texts that belong to it. If a response `is_answered`
    to it, the prompt may not end with the assistant's own."""
    prompt, name = text_or_chat(record, key), key.rpartition(".")[2].lower()
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
    """Returns a prompt that begins with a system message: its own, that of another `given` prompt,
    or the row's. As it is if there is none."""
    own = system_of(prompt)
    text = system_of(given) or _text(record, _SYSTEM, within=own)
    if own or not text:
        return prompt
    return [{"role": "system", "content": text}, *as_messages(prompt, "user")]


def system_of(prompt: PromptText) -> str:
    if isinstance(prompt, str) or prompt[0]["role"] != "system":
        return ""
    return prompt[0]["content"]


def without_prompt(prompt: PromptText, responses: Sequence[PromptText]) -> Sequence[PromptText]:
    """Returns what follows the prompt in texts that all begin with it; else the responses."""
    asked = (prompt if isinstance(prompt, str) else prompt[-1]["content"]).strip()
    texts = [each.lstrip() for each in responses if isinstance(each, str)]
    found = [text.removeprefix(asked) for text in texts if text.startswith(asked)]
    return found if len(found) == len(responses) and all(map(str.strip, found)) else responses


def _text(record: Record, names: Sequence[str], within: str = "") -> str:
    """Returns the text of the first of these columns that has one (which is a part of `within`) and
    is not read for another purpose; else ""."""
    for name in record.unread:
        value = record.fields[name]
        if name.lower() not in names or not isinstance(value, str) or not value.strip():
            continue
        if not within or value.strip() in within:
            record.read.append(name)
            return value
    return ""
