"""Ends responses with the token with which a chat template ends an answer.

A model that learned from the template ends its answers with the text that the template writes after
them, even if its checkpoint names other end tokens. Does not know models.
"""

from pat_jax.rl.text.chat_template import ChatTemplateError
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer

_ANSWER = "7391605284"  # in place of an answer: no template has it or changes its letters' case
_TURNS = ({"role": "user", "content": "1947"}, {"role": "assistant", "content": _ANSWER})
_LONGEST = 1000  # characters; a template that writes more behind an answer is broken


def stop_at_turn_end(tokenizer: HuggingFaceTokenizer) -> None:
    """Adds the token with which the chat template ends an answer to `tokenizer.eos_ids`. Then
    `tokenizer.note` tells the user so, or that the template ends answers with usual tokens."""
    behind = _behind_answer(tokenizer) if tokenizer.has_chat_template else ""
    special = tokenizer.special
    own = " or ".join(tokenizer.eos_texts)
    tokens = [x for x in tokenizer.encode(behind) if x not in special.beginning]
    ends = {x for x, text in special.texts.items() if text.strip()} | {*tokenizer.eos_ids}
    marks = [token for token in tokens if token in ends]
    if tokens and not marks and (text := behind.strip()):
        tokenizer.note = (
            f"the chat template ends an answer with the text {text[:40]!r}, of usual tokens: "
            f"responses go on behind it, up to {own} or their longest"
        )
    elif marks and marks[0] not in tokenizer.eos_ids:
        [text] = tokenizer.texts_of(marks[:1])
        tokenizer.eos_ids = (*tokenizer.eos_ids, marks[0])
        tokenizer.note = (
            f"the chat template ends an answer with {text!r}, and the checkpoint names {own} alone: "
            "responses end there, too"
        )


def _behind_answer(tokenizer: HuggingFaceTokenizer) -> str:
    try:
        text = tokenizer.chat_text(_TURNS, is_closed=True)
    except ChatTemplateError:  # it may be right for the prompts, which have other messages
        return ""
    _, is_there, behind = text.rpartition(_ANSWER)
    return behind[:_LONGEST] if is_there else ""
