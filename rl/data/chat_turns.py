"""Marks the assistant's tokens in a chat, which a policy would have to generate.

Knows texts that a chat template makes, and tokens. Does not know files or batches.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from pat_jax.rl.text.chat_template import ChatTemplateError
from pat_jax.rl.text.tokenizer import ASSISTANT, ChatMessage, HuggingFaceTokenizer, PromptText

# A text in place of an answer, to find what a template writes before an answer.
_PROBE = "4bd2f0c1"
# Keys of an assistant's message whose value is 1 if the turn is to be learned, else 0 (OpenAI,
# axolotl, ms-swift). Other values, such as a recorded loss, have no such meaning.
LEARNED_KEYS = ("weight", "train", "training", "loss")

Encode = Callable[[str], list[int]]
Write = Callable[..., str]  # as `HuggingFaceTokenizer.chat_text`: (messages, is_closed) -> text


class Piece(NamedTuple):
    """One of the consecutive parts of a text."""

    text: str
    is_generated: bool  # whether the assistant generates it


class Marked(NamedTuple):
    tokens: list[int]
    is_generated: list[bool]


def as_messages(content: PromptText, role: str) -> Sequence[ChatMessage]:
    """Returns `content` if it is messages, or the text `content` as one message of `role`."""
    return [{"role": role, "content": content}] if isinstance(content, str) else content


def mark_turns(
    tokenizer: HuggingFaceTokenizer,
    messages: Sequence[ChatMessage],
    first: int = 0,
    variables: Mapping[str, Any] | None = None,
    *,
    only: bool = True,
) -> Marked:
    """Returns a chat's tokens up to the end of the assistant's last message, with the assistant's
    turns marked, except those that are not to be learned (`LEARNED_KEYS`). Raises ChatTemplateError
    if the template fails or leaves out an answer, or if turns cannot be found because it writes
    messages differently once others follow.

    A turn is the policy's answer to the messages before it. It reaches from the end of the
    template's generation prompt to the first token of `eos_ids`, which is included. If the template
    ends no turn with such a token, one is added to the last turn, so that a policy learns to stop.

    Args:
      messages: the chat; from index `first` on, at least one message must be the assistant's.
      first: messages before this index are context, whatever their role.
      only: whether only the assistant's turns are marked, not the text between them as well.
    """
    write = partial(tokenizer.chat_text, variables=variables)
    chat = _Chat(write, tokenizer.eos_texts, messages, write(messages, is_closed=True))
    pieces = list(chat.pieces(first, learns_all=not only))
    return ended(join_pieces(pieces, tokenizer.encode_chat, tokenizer.encode), tokenizer.eos_ids)


def ended(marked: Marked, eos_ids: Sequence[int]) -> Marked:
    """Returns the tokens with an end-of-sequence token, marked as the last one; unchanged if the
    last token is one."""
    if marked.tokens[-1] in eos_ids:
        return marked
    return Marked([*marked.tokens, eos_ids[0]], [*marked.is_generated, marked.is_generated[-1]])


def unread_keys(
    tokenizer: HuggingFaceTokenizer, variables: Mapping[str, Any], chat: Sequence[ChatMessage]
) -> set[str]:
    """Returns the names of the messages' keys that the chat template does not use."""
    given = {(key, value in (0, 1)) for message in chat for key, value in message.items()}
    keys = {key for key, tells in given if not (tells and key in LEARNED_KEYS)}
    keys -= {"role", "content"}

    def without(names: set[str]) -> str | None:
        others = [{key: each[key] for key in each if key not in names} for each in chat]
        with suppress(ChatTemplateError):  # the template needs them
            return tokenizer.chat_text(others, variables, is_closed=True)

    if keys and tokenizer.has_chat_template and without(keys) != (whole := without(set())):
        keys = {key for key in keys if without({key}) == whole}
    return {f"{key} of messages" for key in keys}


def join_pieces(pieces: Sequence[Piece], begin: Encode, go_on: Encode) -> Marked:
    """Returns the tokens of all pieces; none reaches from one piece into the next.

    The first piece is tokenized alone, as it is for a policy that continues it. A later piece is
    tokenized together with the text before, since some tokenizers put a space before a text that
    stands alone. If that would change the earlier tokens, it is tokenized alone, too.

    Args:
      begin: function that returns the tokens of a text from its beginning.
      go_on: function that returns the tokens of a text that follows others.
    """
    tokens = list[int]()
    is_generated = list[bool]()
    before = ""
    for piece in pieces:
        before += piece.text
        whole = begin(before)
        is_prefix = whole[: len(tokens)] == tokens
        more = whole[len(tokens) :] if is_prefix else go_on(piece.text)
        tokens += more
        is_generated += [piece.is_generated] * len(more)
    return Marked(tokens, is_generated)


@dataclass(frozen=True)
class _Chat:
    write: Write
    eos_texts: Sequence[str]
    messages: Sequence[ChatMessage]
    whole: str  # the chat's text, as the template writes it

    def pieces(self, first: int, *, learns_all: bool) -> Iterator[Piece]:
        later = range(first, len(self.messages))
        done = 0
        turns = [i for i in later if self.messages[i]["role"] == ASSISTANT]
        starts = [self._start(i) for i in turns]
        for i, start, limit in zip(turns, starts, [*starts[1:], len(self.whole)], strict=True):
            if start < done:
                raise _untold(i)
            end = self._end(i, start, limit)
            self._check_is_rendered(i, self.whole[start:end])
            yield Piece(self.whole[done:start], learns_all)
            is_learned = all(self.messages[i].get(key, 1) != 0 for key in LEARNED_KEYS)
            yield Piece(self.whole[start:end], is_learned)
            done = end

    def _start(self, i: int) -> int:
        """Returns the index in the whole chat's text where the answer `messages[i]` begins."""
        if i and self.messages[i - 1]["role"] != ASSISTANT:
            asked = self.write(self.messages[:i], is_closed=False)
            if self.whole.startswith(asked):
                return len(asked)
        # For example, the generation prompt opens a thought, which is not kept in a chat.
        head, probe, _ = self._probed(i).partition(_PROBE)
        if not probe:
            raise _unsaid(i)
        if not self.whole.startswith(head):
            raise _untold(i)
        return len(head)

    def _end(self, i: int, start: int, limit: int) -> int:
        """Returns the index after the token that ends the answer or, without one, its message."""
        found = [(self.whole.find(text, start, limit), text) for text in self.eos_texts]
        ends = [at + len(text) for at, text in found if at >= 0]
        if ends:
            return min(ends)
        if i == len(self.messages) - 1:
            return len(self.whole)
        closed = self.write(self.messages[: i + 1], is_closed=True)
        if not self.whole.startswith(closed):
            raise _untold(i)
        return len(closed)

    def _probed(self, i: int) -> str:
        """Returns the whole chat's text with `_PROBE` in place of the answer `messages[i]`."""
        probe = {**self.messages[i], "content": _PROBE}
        return self.write([*self.messages[:i], probe, *self.messages[i + 1 :]], is_closed=True)

    def _check_is_rendered(self, i: int, rendered: str) -> None:
        """Raises ChatTemplateError if the template leaves the answer out: the policy would learn to
        be silent. A template may change spaces, drop thoughts and escape characters. So if the
        rendered text differs from the message, the chat is rendered again with `_PROBE` instead."""
        for text in self.eos_texts:
            rendered = rendered.replace(text, "")
        message = self.messages[i]
        content, rendered = ("".join(x.split()) for x in (message["content"], rendered))
        if content == rendered if content else rendered or not message.get("tool_calls"):
            return
        if not rendered or _PROBE not in self._probed(i):
            raise _unsaid(i)


def _unsaid(i: int) -> ChatTemplateError:
    return ChatTemplateError(
        f"the chat template leaves out what the assistant says in message {i + 1}: expected one that "
        "writes it, because else nothing but silence is learned; correct the template or the row."
    )


def _untold(i: int) -> ChatTemplateError:
    return ChatTemplateError(
        f"the chat template writes message {i + 1} in another way once others follow, and ends it "
        "with no end-of-sequence token: expected one that tells which tokens the assistant says; "
        "give its last answer alone as completion, or take --assistant_only_loss false."
    )
