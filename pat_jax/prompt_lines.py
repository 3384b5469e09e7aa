"""Lines of a prompts file: what is to be generated, and how, one JSON object each.

    {"prompt": text} | {"messages": [{"role": …, "content": …}, …]} | {"token_ids": [ints]}

besides `id`, `metadata` (both copied to the results) and any field of `Wishes`. Knows what can be
wrong with a line; does not know engines.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pat_jax.engine.types import MAX_STOP_IDS, Sampling
from pat_jax.errors import UserError
from pat_jax.rl.tokenizer import HuggingFaceTokenizer

PROMPT_FIELDS = ("prompt", "messages", "token_ids")


@dataclass(frozen=True)
class Wishes:
    """How to sample, under the names of the command's options; None where nobody has said."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    logprobs: int | None = None
    n: int | None = None
    seed: int | None = None

    def over(self, other: "Wishes") -> "Wishes":
        """These, and where nothing is said `other`."""
        return replace(other, **_given(self))

    @property
    def sampling(self) -> Sampling:
        """Raises ValueError in one sentence that names the field."""
        given: dict[str, Any] = {
            name: value for name, value in _given(self).items() if name in _SAMPLING
        }
        stops = given.get("stop_token_ids", ())
        if isinstance(stops, list):
            if len(stops) > MAX_STOP_IDS:
                raise ValueError(
                    f"stop_token_ids has {len(stops)} entries: expected up to {MAX_STOP_IDS}."
                )
            stops = tuple(stops)
        given["stop_token_ids"] = stops
        return Sampling(**given)

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None or self.stop == "":
            return ()
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
            raise ValueError(f"stop is {self.stop!r}: expected text or a list of texts.")
        return tuple(stops)

    def count(self, name: str, default: int, least: int) -> int:
        value = getattr(self, name)
        if value is None:
            return default
        if type(value) is not int or not least <= value < 2**63:
            raise ValueError(f"{name} is {value!r}: expected an integer of at least {least}.")
        return value


_SAMPLING = {field.name for field in fields(Sampling)}
_WISHES = {field.name for field in fields(Wishes)}
_KNOWN = (*PROMPT_FIELDS, "id", "metadata", *_WISHES)


def _given(wishes: Wishes) -> dict[str, Any]:
    values = {field.name: getattr(wishes, field.name) for field in fields(wishes)}
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Ask:
    """One line, understood."""

    tokens: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    num_samples: int
    seed: int | None  # None: the run's, and the line's number
    stops: tuple[str, ...]
    wants_logprobs: bool


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers, from 1, and lines that are not blank, as they are needed.

    Raises:
      UserError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line.decode("utf-8-sig" if number == 1 else "utf-8", "replace")
    except OSError as error:
        raise UserError(
            f"option --prompts is {str(path)!r}: the file cannot be read ({error.strerror}); expected "
            "a file of JSON lines."
        ) from None


def parse_object(line: str) -> dict[str, Any]:
    """Raises ValueError in one sentence."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"broken JSON at column {error.colno} ({error.msg}): expected one object a line."
        ) from None
    except RecursionError:
        raise ValueError("JSON nested too deeply to be read: expected a flatter object.") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}: expected one object a line.")
    return value


def parse_ask(
    given: Mapping[str, Any],
    defaults: Wishes,
    recommended: Wishes,
    tokenizer: HuggingFaceTokenizer | None,
    *,
    max_length: int,
) -> Ask:
    """What a line asks for.

    Args:
      defaults: what the command says, where the line does not.
      recommended: what the checkpoint says, where the command does not either. Its `max_tokens` is
        cut to what fits: nobody has asked for it.
      tokenizer: None allows token ids only.
      max_length: tokens of prompt and response that can be; what is left of it is `max_tokens`
        where nobody has said.

    Raises:
      ValueError: one sentence that names the field.
    """
    for name in given:
        if name not in _KNOWN:
            near = get_close_matches(name, _KNOWN, 1)
            hint = f"did you mean {near[0]!r}?" if near else "put fields of your own in 'metadata'."
            raise ValueError(f"unknown field {name!r}: {hint}")
    own = Wishes(**{name: value for name, value in given.items() if name in _WISHES})
    asked = own.over(defaults)
    wishes = asked.over(recommended)
    sampling, tokens = wishes.sampling, tuple(_tokens(given, tokenizer))
    if wishes.stops and tokenizer is None:
        raise ValueError("stop is text: without a tokenizer expected stop_token_ids.")
    left = max(max_length - len(tokens), 1)
    return Ask(
        tokens,
        sampling,
        asked.count("max_tokens", min(left, recommended.count("max_tokens", left, 1)), 1),
        wishes.count("n", 1, 1),
        wishes.count("seed", 0, 0) if wishes.seed is not None else None,
        wishes.stops,
        wishes.logprobs is not None,
    )


def _tokens(given: Mapping[str, Any], tokenizer: HuggingFaceTokenizer | None) -> Sequence[int]:
    named = [name for name in PROMPT_FIELDS if name in given]
    if len(named) != 1:
        found = " and ".join(named) or "none"
        raise ValueError(f"expected one of {', '.join(PROMPT_FIELDS)} in each line, found {found}.")
    (name,) = named
    value = given[name]
    if name == "token_ids":
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise ValueError("token_ids is no list of integers: expected token ids.")
        return value
    if tokenizer is None:
        raise ValueError(f"{name} is text, but the model has no tokenizer: expected token_ids.")
    if name == "prompt":
        if not isinstance(value, str):
            raise ValueError(f"prompt is a JSON {type(value).__name__}: expected text.")
        return tokenizer.encode_text(_text(name, value))
    return _chat(value, tokenizer)


def _text(name: str, value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can say what no text is
        raise ValueError(
            f"{name} has half of a character at {error.start} (a lone surrogate): expected text."
        ) from None
    return value


def _chat(messages: Any, tokenizer: HuggingFaceTokenizer) -> Sequence[int]:
    is_chat = isinstance(messages, list) and all(
        isinstance(message, dict)
        and all(isinstance(message.get(key), str) for key in ("role", "content"))
        for message in messages
    )
    if not is_chat or not messages:
        raise ValueError("messages: expected a list of chat messages, each with role and content.")
    if not tokenizer.has_chat_template:
        raise ValueError(
            "messages need a chat template, which this tokenizer lacks: give a prompt."
        )
    for message in messages:
        _text("messages", message["content"])
    from jinja2 import TemplateError  # the tokenizer has imported it

    try:
        return tokenizer.encode_prompt(messages)
    except TemplateError as error:
        raise ValueError(f"messages: the chat template refuses them ({error}).") from None
