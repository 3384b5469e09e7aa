"""Decodes tokens to text as they come, finds stop strings, and makes result lines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pat_jax.engine.sequences.responses import Completion
from pat_jax.rl.text.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"  # what a tokenizer makes of a part of a character


@dataclass(frozen=True)
class Answer:
    """One sampled response to a prompt, with the fields of a line of a results file."""

    line: int  # number of the prompt, from 1
    sample: int  # number of the response among those to the prompt, from 0
    text: str | None  # None: the model has no tokenizer
    token_ids: list[int]
    finish_reason: str  # stop, length or error
    usage: Mapping[str, int]  # numbers of prompt_tokens and completion_tokens
    logprobs: list[dict[str, Any]] = field(default_factory=list)  # by token, if asked for
    error: str = ""  # one sentence if the response could not be completed
    id: Any = None  # of the prompt's line, as is metadata
    metadata: Any = None


@dataclass
class TextStream:
    """Decodes tokens to text one at a time.

    Each new piece of text is decoded together with the piece before it, because the text of a
    token may depend on its neighbours.
    """

    tokenizer: Tokenizer
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    _before: int = 0  # tokens before the newest piece of text, which is decoded again
    _done: int = 0  # tokens whose text is in `text`

    def add(self, token: int) -> None:
        self.tokens.append(token)
        known = self.tokenizer.decode(self.tokens[self._before : self._done])
        text = self.tokenizer.decode(self.tokens[self._before :])
        if text.endswith(_INCOMPLETE):
            return  # the character goes on in the next token
        self.text += text[len(known) :]
        self._before, self._done = self._done, len(self.tokens)


class StopFinder:
    """Looks for stop strings in a response as it grows."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], *, min_tokens: int = 0):
        """Makes a finder that ignores stop strings completed within the first `min_tokens` tokens,
        as generation ignores stop tokens there."""
        self.stream = TextStream(tokenizer)
        self.stops = stops
        self.min_tokens = min_tokens
        self.found_at: int | None = None  # where in the text the first stop string begins

    @property
    def num_tokens(self) -> int:
        """The number of tokens searched, up to the one that completed the first stop string."""
        return len(self.stream.tokens)

    @property
    def text(self) -> str:
        """The text of the response so far, without the stop string and what follows it."""
        return self.stream.text[: self.found_at]

    def has_stopped(self, tokens: np.ndarray) -> bool:
        """Returns whether all of the response so far, int[tokens], contains a stop string."""
        for token in tokens[self.num_tokens :]:
            if self.found_at is not None:
                break
            known = len(self.stream.text)
            self.stream.add(int(token))
            if self.num_tokens > self.min_tokens:
                self._search(known)
        return self.found_at is not None

    def _search(self, known: int) -> None:
        """Searches for stop strings that end after the first `known` characters of the text."""
        text = self.stream.text
        places = [text.find(stop, max(0, known - len(stop) + 1)) for stop in self.stops]
        self.found_at = min((place for place in places if place >= 0), default=None)


def describe(
    done: Completion,
    tokenizer: Tokenizer | None,
    finder: StopFinder | None,
    *,
    wants_logprobs: bool,
) -> dict[str, Any]:
    """Returns the fields of a result that describe the response: text, tokens, finish reason …"""
    tokens = done.tokens
    reason = "length" if done.is_truncated else "stop"
    has_stopped = finder is not None and finder.has_stopped(tokens)
    if finder is not None and has_stopped:
        tokens = tokens[: finder.num_tokens]
        text = finder.text
        reason = "stop"
    else:
        text = None if tokenizer is None else tokenizer.decode(tokens.tolist())
    result: dict[str, Any] = {"text": text, "token_ids": tokens.tolist(), "finish_reason": reason}
    if wants_logprobs:
        result["logprobs"] = [_logprob(done, i) for i in range(len(tokens))]
    if done.error and not has_stopped:  # an error after a stop string does not matter
        result |= {"finish_reason": "error", "error": done.error}
    return result


def _logprob(done: Completion, i: int) -> dict[str, Any]:
    entry: dict[str, Any] = {"token_id": int(done.tokens[i]), "logprob": _short(done.logprobs[i])}
    if done.top_tokens is not None and done.top_logprobs is not None:
        pairs = zip(done.top_tokens[i], done.top_logprobs[i], strict=True)
        entry["top"] = [[int(token), _short(logprob)] for token, logprob in pairs]
    return entry


def _short(value: np.floating) -> float:
    """Rounds a float32 to the fewest digits that identify it."""
    return float(str(value))
