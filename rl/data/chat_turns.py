"""Which tokens of a chat the assistant says: those that a policy would have to sample.

Knows texts that a chat template makes, and tokens. Does not know files or batches.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from pat_jax.rl.text.chat_template import ChatTemplateError
from pat_jax.rl.text.tokenizer import ASSISTANT, ChatMessage, HuggingFaceTokenizer

# In the place of an answer, to see what a template writes before one. No template looks for it.
_PROBE = "4bd2f0c1"

Encode = Callable[[str], list[int]]
Write = Callable[..., str]  # messages, is_closed: as `HuggingFaceTokenizer.chat_text`


class Piece(NamedTuple):
    """A part of a text, in order."""

    text: str
    is_generated: bool  # by the assistant


class Marked(NamedTuple):
    tokens: list[int]
    is_generated: list[bool]


def mark_turns(
    tokenizer: HuggingFaceTokenizer,
    messages: Sequence[ChatMessage],
    first: int = 0,
    variables: Mapping[str, Any] | None = None,
) -> Marked:
    """A chat as its template writes it, up to the end of the assistant's last message.

    A turn is what a policy answers to the messages before it: from where the template's request for
    an answer ends to the first token of `eos_ids`, that token included. Where the template ends no
    turn with one, the last turn gets it: without it a policy would never learn to stop.

    Args:
      messages: at least one of them the assistant's, from `first` on.
      first: messages before it are context, of whatever role.
      variables: of the template, besides those of every chat.

    Raises:
      ChatTemplateError: the template fails, or it writes messages in another way once others
        follow, so that nobody could tell which tokens are whose, or an answer not at all.
    """
    write = partial(tokenizer.chat_text, variables=variables)
    chat = _Chat(write, tokenizer.eos_texts, messages, write(messages, is_closed=True))
    pieces = list(chat.pieces(first))
    return ended(join_pieces(pieces, tokenizer.encode_chat, tokenizer.encode), tokenizer.eos_ids)


def ended(marked: Marked, eos_ids: Sequence[int]) -> Marked:
    """With an end of sequence, which is learned, unless it has one."""
    if marked.tokens[-1] in eos_ids:
        return marked
    return Marked([*marked.tokens, eos_ids[0]], [*marked.is_generated, True])


def join_pieces(pieces: Sequence[Piece], begin: Encode, go_on: Encode) -> Marked:
    """The tokens of the pieces, none of which reaches from one into the next.

    The first piece's tokens are those of its text alone, as a policy is given them. What follows is
    read in its context, where that leaves the tokens before it as they are: some tokenizers put a
    space before a text that stands alone.

    Args:
      begin: tokens of a text from its beginning.
      go_on: tokens of a text with others before it.
    """
    tokens, is_generated, before = list[int](), list[bool](), ""
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
    whole: str  # as the template writes it

    def pieces(self, first: int) -> Iterator[Piece]:
        later, done = range(first, len(self.messages)), 0
        turns = [i for i in later if self.messages[i]["role"] == ASSISTANT]
        starts = [self._start(i) for i in turns]
        for i, start, limit in zip(turns, starts, [*starts[1:], len(self.whole)], strict=True):
            if start < done:
                raise _untold(i)
            end = self._end(i, start, limit)
            self._check_is_rendered(i, self.whole[start:end])
            yield Piece(self.whole[done:start], False)
            yield Piece(self.whole[start:end], True)
            done = end

    def _start(self, i: int) -> int:
        """Where the answer `messages[i]` begins in the text of the whole chat."""
        if i and self.messages[i - 1]["role"] != ASSISTANT:
            asked = self.write(self.messages[:i], is_closed=False)
            if self.whole.startswith(asked):
                return len(asked)
        # Such as a request for an answer that opens its thoughts, which are not kept in a chat.
        head, probe, _ = self._probed(i).partition(_PROBE)
        if not probe:
            raise _unsaid(i)
        if not self.whole.startswith(head):
            raise _untold(i)
        return len(head)

    def _end(self, i: int, start: int, limit: int) -> int:
        """Behind the token that ends the answer, or, where there is none, behind its message."""
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
        """The whole chat with another text in the place of an answer."""
        probe = {**self.messages[i], "content": _PROBE}
        return self.write([*self.messages[:i], probe, *self.messages[i + 1 :]], is_closed=True)

    def _check_is_rendered(self, i: int, rendered: str) -> None:
        """Refuses an answer that the template leaves out: to say nothing would be learned from it.

        It may change spaces, drop thoughts and escape characters, so that what differs from the
        message is asked for again with a text that cannot be there by chance.
        """
        for text in self.eos_texts:
            rendered = rendered.replace(text, "")
        content, rendered = ("".join(x.split()) for x in (self.messages[i]["content"], rendered))
        if not content or content == rendered:
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
