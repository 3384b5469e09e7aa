"""Which tokens of a chat the assistant says: those that a policy would have to sample.

Knows texts that a chat template makes, and tokens. Does not know files or batches.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pat_jax.rl.chat_template import ChatTemplateError
from pat_jax.rl.tokenizer import ASSISTANT, ChatMessage, HuggingFaceTokenizer

# In the place of an answer, to see what a template writes before one. No template looks for it.
_PROBE = "4bd2f0c1"

Encode = Callable[[str], list[int]]


class Piece(NamedTuple):
    """A part of a text, in order."""

    text: str
    is_said: bool  # by the assistant


class Marked(NamedTuple):
    tokens: list[int]
    is_said: list[bool]


def mark_turns(
    tokenizer: HuggingFaceTokenizer, messages: Sequence[ChatMessage], first: int = 0
) -> Marked:
    """A chat as its template writes it, up to the end of the assistant's last message.

    A turn is what a policy answers to the messages before it: from where the template's request for
    an answer ends to the first token of `eos_ids`, that token included. Where the template ends no
    turn with one, the last turn gets it: without it a policy would never learn to stop.

    Args:
      messages: at least one of them the assistant's, from `first` on.
      first: messages before it are context, whoever says them.

    Raises:
      ChatTemplateError: the template fails, or it writes messages in another way once others
        follow, so that nobody could tell which tokens are whose.
    """
    pieces = list(_pieces(tokenizer, messages, first))
    return ended(join_pieces(pieces, tokenizer.encode, tokenizer.encode), tokenizer.eos_ids)


def ended(marked: Marked, eos_ids: Sequence[int]) -> Marked:
    """With an end of sequence, which is learned, unless it has one."""
    if marked.tokens[-1] in eos_ids:
        return marked
    return Marked([*marked.tokens, eos_ids[0]], [*marked.is_said, True])


def join_pieces(pieces: Sequence[Piece], begin: Encode, go_on: Encode) -> Marked:
    """The tokens of the pieces, none of which reaches from one into the next.

    The first piece's tokens are those of its text alone, as a policy is given them. What follows is
    read in its context, where that leaves the tokens before it as they are: some tokenizers put a
    space before a text that stands alone.

    Args:
      begin: tokens of a text from its beginning.
      go_on: tokens of a text with others before it.
    """
    tokens, is_said, before = list[int](), list[bool](), ""
    for piece in pieces:
        before += piece.text
        whole = begin(before)
        is_prefix = whole[: len(tokens)] == tokens
        more = whole[len(tokens) :] if is_prefix else go_on(piece.text)
        tokens += more
        is_said += [piece.is_said] * len(more)
    return Marked(tokens, is_said)


def _pieces(
    tokenizer: HuggingFaceTokenizer, messages: Sequence[ChatMessage], first: int
) -> Iterator[Piece]:
    whole, done = tokenizer.chat_text(messages, is_closed=True), 0
    turns = [i for i in range(first, len(messages)) if messages[i]["role"] == ASSISTANT]
    starts = [_start(tokenizer, messages, i, whole) for i in turns]
    for i, start, limit in zip(turns, starts, [*starts[1:], len(whole)], strict=True):
        if start < done:
            raise _untold(i)
        end = _end(tokenizer, messages, i, whole, start, limit)
        yield Piece(whole[done:start], False)
        yield Piece(whole[start:end], True)
        done = end


def _start(
    tokenizer: HuggingFaceTokenizer, messages: Sequence[ChatMessage], i: int, whole: str
) -> int:
    """Where the answer `messages[i]` begins in the text of the whole chat."""
    if i and messages[i - 1]["role"] != ASSISTANT:
        asked = tokenizer.chat_text(messages[:i], is_closed=False)
        if whole.startswith(asked):
            return len(asked)
    # Such as a request for an answer that opens its thoughts, which are not kept in a chat.
    probed = [*messages[:i], {**messages[i], "content": _PROBE}, *messages[i + 1 :]]
    head, probe, _ = tokenizer.chat_text(probed, is_closed=True).partition(_PROBE)
    if not probe or not whole.startswith(head):
        raise _untold(i)
    return len(head)


def _end(
    tokenizer: HuggingFaceTokenizer,
    messages: Sequence[ChatMessage],
    i: int,
    whole: str,
    start: int,
    limit: int,
) -> int:
    """Behind the token that ends the answer, or, where there is none, behind its message."""
    found = [(whole.find(text, start, limit), text) for text in tokenizer.eos_texts]
    ends = [at + len(text) for at, text in found if at >= 0]
    if ends:
        return min(ends)
    if i == len(messages) - 1:
        return len(whole)
    closed = tokenizer.chat_text(messages[: i + 1], is_closed=True)
    if not whole.startswith(closed):
        raise _untold(i)
    return len(closed)


def _untold(i: int) -> ChatTemplateError:
    return ChatTemplateError(
        f"the chat template writes message {i + 1} in another way once others follow, and ends it "
        "with no end-of-sequence token: expected one that tells which tokens the assistant says; "
        "give its last answer alone as completion, or take --assistant_only_loss false."
    )
