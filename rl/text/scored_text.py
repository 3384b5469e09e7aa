"""The text that a reward model reads: prompt and response, rendered by the model's chat template.

It is the text that transformers' `apply_chat_template` returns for the messages. It includes what
the template writes after the response, since the model was trained on that, too.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from pat_jax.common.errors import UserError
from pat_jax.rl.text.chat_template import ChatTemplateError
from pat_jax.rl.text.tokenizer import (
    ASSISTANT,
    ChatMessage,
    HuggingFaceTokenizer,
    PromptText,
    flatten_messages,
)

_PROBE = "4bd2f0c1"  # a response that no template treats specially


def scored_tokens(
    tokenizer: HuggingFaceTokenizer, prompt: PromptText, response: str
) -> Sequence[int]:
    """Returns the tokens of a prompt and its response.

    With a chat template, the response is the assistant's message after those of the prompt, or
    continues the prompt's last message if that is the assistant's. A plain text as prompt becomes
    the user's message. Without a template, the response follows the prompt, and an end-of-sequence
    token follows the response, as in TRL's `RewardTrainer`.
    """
    if not tokenizer.has_chat_template:
        tokens = tokenizer.encode_text(flatten_messages(prompt) + response)
        is_ended = bool(tokens) and tokens[-1] in tokenizer.eos_ids
        return tokens if is_ended else [*tokens, tokenizer.eos_ids[0]]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = _answered(messages, response)
    return tokenizer.encode_chat(tokenizer.chat_text(messages, is_closed=True))


def until_padding(tokens: Int[np.ndarray, " _"], pad_id: int | None) -> Int[np.ndarray, " _"]:
    """Returns the tokens up to the one at which transformers reads the score: the last token that
    is not `pad_id`, or the first token if all are."""
    others = np.flatnonzero(tokens != pad_id)
    return tokens[: others[-1] + 1 if len(others) else 1]


def check_template(tokenizer: HuggingFaceTokenizer) -> None:
    """Raises UserError if the tokenizer has a chat template that fails or leaves a response out."""
    if not tokenizer.has_chat_template:
        return
    try:
        text = tokenizer.chat_text(
            _answered([{"role": "user", "content": "1"}], _PROBE), is_closed=True
        )
    except ChatTemplateError as error:
        raise UserError(f"{tokenizer.directory}: {error}") from None
    if _PROBE not in text:
        raise UserError(
            f"{tokenizer.directory}: the chat template leaves out what the assistant answers: expected one "
            "with a place for the response, which the model is to score; correct the template, or "
            "choose another model."
        )


def _answered(messages: Sequence[ChatMessage], response: str) -> list[ChatMessage]:
    *before, last = messages
    if last["role"] == ASSISTANT:
        return [*before, {**last, "content": last["content"] + response}]
    return [*messages, {"role": ASSISTANT, "content": response}]
