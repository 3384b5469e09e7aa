"""Which tokens of a chat the assistant says: those that a policy would have to sample.

Knows texts that a chat template makes, and tokens. Does not know files or batches.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    is_said: bool  # by the assistant


class Marked(NamedTuple):
    tokens: list[int]
    is_said: list[bool]


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
    pieces = list(_pieces(write, tokenizer.eos_texts, messages, first))
    return ended(join_pieces(pieces, tokenizer.encode_chat, tokenizer.encode), tokenizer.eos_ids)


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
    write: Write, eos_texts: Sequence[str], messages: Sequence[ChatMessage], first: int
) -> Iterator[Piece]:
    whole, done = write(messages, is_closed=True), 0
    turns = [i for i in range(first, len(messages)) if messages[i]["role"] == ASSISTANT]
    starts = [_start(write, messages, i, whole) for i in turns]
    for i, start, limit in zip(turns, starts, [*starts[1:], len(whole)], strict=True):
        if start < done:
            raise _untold(i)
        end = _end(write, eos_texts, messages, i, whole, start, limit)
        _check_is_said(write, eos_texts, messages, i, whole[start:end])
        yield Piece(whole[done:start], False)
        yield Piece(whole[start:end], True)
        done = end


def _start(write: Write, messages: Sequence[ChatMessage], i: int, whole: str) -> int:
    """Where the answer `messages[i]` begins in the text of the whole chat."""
    if i and messages[i - 1]["role"] != ASSISTANT:
        asked = write(messages[:i], is_closed=False)
        if whole.startswith(asked):
            return len(asked)
    # Such as a request for an answer that opens its thoughts, which are not kept in a chat.
    head, probe, _ = write(_probed(messages, i), is_closed=True).partition(_PROBE)
    if not probe:
        raise _unsaid(i)
    if not whole.startswith(head):
        raise _untold(i)
    return len(head)


def _end(
    write: Write,
    eos_texts: Sequence[str],
    messages: Sequence[ChatMessage],
    i: int,
    whole: str,
    start: int,
    limit: int,
) -> int:
    """Behind the token that ends the answer, or, where there is none, behind its message."""
    found = [(whole.find(text, start, limit), text) for text in eos_texts]
    ends = [at + len(text) for at, text in found if at >= 0]
    if ends:
        return min(ends)
    if i == len(messages) - 1:
        return len(whole)
    closed = write(messages[: i + 1], is_closed=True)
    if not whole.startswith(closed):
        raise _untold(i)
    return len(closed)


def _probed(messages: Sequence[ChatMessage], i: int) -> list[ChatMessage]:
    return [*messages[:i], {**messages[i], "content": _PROBE}, *messages[i + 1 :]]


def _check_is_said(
    write: Write, eos_texts: Sequence[str], messages: Sequence[ChatMessage], i: int, said: str
) -> None:
    """Refuses an answer that the template leaves out: to say nothing would be learned from it.

    It may change spaces, drop thoughts and escape characters, so that what differs from the message
    is asked for again with a text that cannot be there by chance.
    """
    for text in eos_texts:
        said = said.replace(text, "")
    content, said = ("".join(text.split()) for text in (messages[i]["content"], said))
    if not content or content == said:
        return
    if not said or _PROBE not in write(_probed(messages, i), is_closed=True):
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
