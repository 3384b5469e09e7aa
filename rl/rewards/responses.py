"""Responses in the form that reward functions get: texts, tokens and the columns of their rows.

Knows texts, and how a response finished. Does not know functions or processes; imports no jax,
because reward workers import this module.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout
from pat_jax.rl.text.final_answer import opens_thought
from pat_jax.rl.text.tokenizer import Tokenizer

_THINK_TOKENS = 16  # tokens at a prompt's end, enough for `<think>` and the lines after it


@dataclass(frozen=True)
class Response:
    """The data of one response that a reward function may ask for."""

    prompt: str
    completion: str
    columns: Mapping[str, object]
    prompt_ids: Sequence[int] = ()
    completion_ids: Sequence[int] = ()  # the end-of-sequence token included
    is_thinking: bool = False  # whether the chat template opened a thought at the prompt's end
    messages: Sequence[Mapping[str, Any]] = ()  # the prompt's messages; empty if it is a text


def text_of(rollout: Rollout, tokenizer: Tokenizer) -> str:
    """Returns a response's text without its stop token, even if special tokens are decoded."""
    has_eos = rollout.finish is FinishReason.STOP
    return tokenizer.decode(rollout.tokens[: len(rollout.tokens) - has_eos].tolist())


def response_reader(names: Sequence[str], tokenizer: Tokenizer) -> Callable[[Rollout], Response]:
    """Returns a function from a rollout to its `Response`, whose columns include `finish_reason`.

    Args:
      names: names of all columns that any prompt has; a column is None for prompts that lack it.
    """

    def read(rollout: Rollout) -> Response:
        tokens = rollout.tokens.tolist()
        text = text_of(rollout, tokenizer)
        is_thinking = opens_thought(tokenizer.decode(rollout.prompt.tokens[-_THINK_TOKENS:]))
        return _response(rollout.prompt, names, text, tokens, rollout.finish, is_thinking)

    return read


def trial_responses(prompt: Prompt, names: Sequence[str]) -> list[Response]:
    """Returns made-up responses: an empty one, and one with the answer in the usual forms. Columns
    are as in `response_reader`. Their tokens are the prompt's, because not every tokenizer can
    encode these texts."""
    answer = prompt.columns.get("answer", "1")
    right = f"<answer>{answer}</answer>\nThe answer is \\boxed{{{answer}}}.\n#### {answer}"
    stop = FinishReason.STOP
    return [_response(prompt, names, text, prompt.tokens, stop) for text in ("", right)]


def _response(
    prompt: Prompt,
    names: Sequence[str],
    completion: str,
    tokens: Sequence[int],
    finish: FinishReason,
    is_thinking: bool = False,
) -> Response:
    columns = {name: prompt.columns.get(name) for name in names} | {"finish_reason": finish}
    return Response(
        prompt.text, completion, columns, prompt.tokens, tokens, is_thinking, prompt.messages
    )
