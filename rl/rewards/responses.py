"""Responses as reward functions are told of them: texts, tokens and the columns of their rows.

Knows texts, and how a response ended. Does not know functions or processes; imports no jax, because
reward workers import this module.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout
from pat_jax.rl.rewards.final_answer import opens_thought
from pat_jax.rl.text.tokenizer import Tokenizer

_THINK_TOKENS = 16  # at the end of a prompt, enough to spell `<think>` and the lines after it


@dataclass(frozen=True)
class Response:
    """What a reward function may be told of one response."""

    prompt: str
    completion: str
    columns: Mapping[str, object]
    prompt_ids: Sequence[int] = ()
    completion_ids: Sequence[int] = ()  # the end-of-sequence token included
    is_thinking: bool = False  # the chat template opened a thought at the end of the prompt


def text_of(rollout: Rollout, tokenizer: Tokenizer) -> str:
    """Without the token that ended it, whether special tokens are left out or not."""
    has_eos = rollout.finish is FinishReason.STOP
    return tokenizer.decode(rollout.tokens[: len(rollout.tokens) - has_eos].tolist())


def response_reader(names: Sequence[str], tokenizer: Tokenizer) -> Callable[[Rollout], Response]:
    """Texts, tokens, columns of the data and `finish_reason` of responses.

    Args:
      names: of all columns that any prompt has; one is None where the prompt has it not.
    """

    def read(rollout: Rollout) -> Response:
        tokens, text = rollout.tokens.tolist(), text_of(rollout, tokenizer)
        is_thinking = opens_thought(tokenizer.decode(rollout.prompt.tokens[-_THINK_TOKENS:]))
        return _response(rollout.prompt, names, text, tokens, rollout.finish, is_thinking)

    return read


def trial_responses(prompt: Prompt, names: Sequence[str]) -> list[Response]:
    """Made-up responses, with columns as of `response_reader`: nothing, and the answer in the usual
    forms. Their tokens are those of the prompt: not every tokenizer has these texts."""
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
    return Response(prompt.text, completion, columns, prompt.tokens, tokens, is_thinking)
