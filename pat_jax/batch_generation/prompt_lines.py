"""Lines of a prompts file. Each is one JSON object: a prompt and how to sample its responses.

    {"prompt": text} | {"messages": [{"role": …, "content": …}, …]} | {"token_ids": [ints]}

A line may also have `id` and `metadata` (copied to the results), `tools` and `chat_template_kwargs`
(with messages) and any field of `SamplingOverrides`. Knows what can be wrong with a line; does not
know engines.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from pat_jax.batch_generation.answers import StopFinder
from pat_jax.batch_generation.config import Reach
from pat_jax.batch_generation.overrides import MOST_SAMPLES, SamplingOverrides
from pat_jax.batch_generation.prompts import Prompts, parse_object
from pat_jax.common.errors import shown
from pat_jax.common.json_text import has_lone_surrogate
from pat_jax.common.options.names import looked_up
from pat_jax.engine.device.decode.sampling import sequence_key
from pat_jax.engine.sequences.responses import Request
from pat_jax.engine.sequences.sampling import MAX_STOP_IDS, Sampling
from pat_jax.rl.data.splits import has_more_tokens
from pat_jax.rl.data.template_columns import TOOLS, VARIABLES, template_variables
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer, Tokenizer, flatten_messages, is_message

PROMPT_FIELDS = ("prompt", "messages", "token_ids")
BY_LINE, BY_SEED = 2, 3  # streams of sampling keys, after those of training
_OVERRIDES = {field.name for field in fields(SamplingOverrides)}
_KNOWN = (*PROMPT_FIELDS, TOOLS, VARIABLES, "id", "metadata", *_OVERRIDES)


@dataclass(frozen=True)
class LineRequest:
    """The request in a parsed and checked line of a prompts file."""

    tokens: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    num_samples: int
    seed: int | None  # None: the run's seed and the number of the line determine sampling
    stops: tuple[str, ...]
    wants_logprobs: bool

    def request(self, seed: int, line: int, sample: int) -> Request:
        """Returns the request for one `sample` of line number `line` in a run with `seed`."""
        ids = (seed, BY_LINE, line, sample)
        if self.seed is not None:
            ids = (self.seed, BY_SEED, 0, sample)
        return Request(self.tokens, sequence_key(*ids), self.max_tokens, self.sampling)

    def finder(self, tokenizer: Tokenizer | None) -> StopFinder | None:
        """Returns a finder of stop strings for one sample; None if the line has no stop strings."""
        if not self.stops or tokenizer is None:
            return None
        return StopFinder(tokenizer, self.stops, min_tokens=self.sampling.min_tokens)


def reach(
    prompts: Prompts, parse: Callable[[Mapping[str, Any]], LineRequest], most: Reach
) -> Reach:
    """Returns the engine size that the prompts need, so that no larger engine is built. It
    is `most`, the size that the options allow, if they need that much. It is `most`, too, if
    `parse` refuses a line, because the error then names the limits of the options."""
    rows = length = 0
    for _, line in prompts:
        try:
            ask = parse(parse_object(line))
        except ValueError:
            return most
        rows += ask.num_samples
        length = max(length, len(ask.tokens) + ask.max_tokens)
        if rows >= most.rows:
            return most
    return Reach(max(rows, 1), min(max(length, 1), most.length))


def parse_ask(
    given: Mapping[str, Any],
    defaults: SamplingOverrides,
    recommended: SamplingOverrides,
    tokenizer: Tokenizer | None,
    *,
    max_length: int,
) -> LineRequest:
    """Returns the request that a line's object describes.

    Args:
      defaults: the command's options, for fields that the line does not set.
      recommended: the checkpoint's options, for fields that the command does not set either. Their
        `max_tokens` is cut to what `max_length` allows, because the user did not ask for it.
      tokenizer: None allows token ids only.
      max_length: the most tokens of prompt and response together. If no `max_tokens` is given, the
        response may use all that the prompt leaves.

    Raises:
      ValueError: one sentence that names the invalid field.
    """
    _check_fields(given)
    own = SamplingOverrides(**{name: value for name, value in given.items() if name in _OVERRIDES})
    asked = own.over(defaults)
    overrides = asked.over(recommended)
    if overrides.stops and tokenizer is None:
        raise ValueError("stop is text: without a tokenizer expected stop_token_ids.")
    sampling = _with_special_stops(overrides.sampling, overrides.stops, tokenizer)
    tokens = tuple(_tokens(given, tokenizer, max_length))
    left = max(max_length - len(tokens), 1)
    return LineRequest(
        tokens,
        sampling,
        asked.count("max_tokens", min(left, recommended.count("max_tokens", left, 1)), 1),
        overrides.count("n", 1, 1, MOST_SAMPLES),
        overrides.count("seed", 0, 0) if overrides.seed is not None else None,
        overrides.stops,
        overrides.logprobs is not None,
    )


def _check_fields(given: Mapping[str, Any]) -> None:
    for name in given:
        if name not in _KNOWN:
            near, answer = looked_up(str(name), _KNOWN)
            if answer:
                own = "or put a field of your own in 'metadata'"
                raise ValueError(f"{name} is not offered: leave it out, {own}.")
            hint = f"did you mean {near!r}?" if near else "put fields of your own in 'metadata'."
            raise ValueError(f"unknown field {shown(name)}: {hint}")


def _with_special_stops(
    sampling: Sampling, stops: Sequence[str], tokenizer: Tokenizer | None
) -> Sampling:
    """Turns stop strings that are special tokens into stop tokens, because decoded text lacks
    special tokens. Raises ValueError with one sentence if a stop string has a special token and
    other text, or if there are too many stop tokens."""
    if not isinstance(tokenizer, HuggingFaceTokenizer) or not stops:
        return sampling
    ids = list(sampling.stop_token_ids)
    special = tokenizer.special.texts
    by_text = {text: token for token, text in special.items()}
    for stop in stops:
        if stop in by_text:
            ids.append(by_text[stop])
        elif inside := next((text for text in by_text if text in stop), ""):
            raise ValueError(
                f"stop is {shown(stop)}, in which {inside!r} is a special token, which no text has: "
                f"expected it alone or not at all; give {shown(inside)}."
            )
    ids = [token for token in dict.fromkeys(ids) if token not in tokenizer.eos_ids]
    if len(ids) > MAX_STOP_IDS:
        raise ValueError(
            f"stop and stop_token_ids have {len(ids)} tokens together: expected up to {MAX_STOP_IDS}."
        )
    return replace(sampling, stop_token_ids=tuple(ids))


def _tokens(
    given: Mapping[str, Any], tokenizer: Tokenizer | None, max_length: int
) -> Sequence[int]:
    named = [name for name in PROMPT_FIELDS if name in given]
    if len(named) != 1:
        found = " and ".join(named) or "none"
        raise ValueError(f"expected one of {', '.join(PROMPT_FIELDS)} in each line, found {found}.")
    (name,) = named
    value = given[name]
    for variable in (TOOLS, VARIABLES):
        if given.get(variable) is not None and name != "messages":
            raise ValueError(f"{variable} belongs to a chat template: expected messages beside it.")
    if name == "token_ids":
        if not isinstance(value, list) or not all(map(is_token_id, value)):
            raise ValueError("token_ids is no list of integers: expected token ids.")
        return value
    if tokenizer is None:
        raise ValueError(f"{name} is text, but the model has no tokenizer: expected token_ids.")
    if has_lone_surrogate(value):  # JSON can hold strings that are not valid text
        raise ValueError(f"{name} has half of a character (a lone surrogate): expected text.")
    if name == "messages":
        return _chat(given, tokenizer, max_length)
    if not isinstance(value, str):
        raise ValueError(f"prompt is a JSON {type(value).__name__}: expected text.")
    _refuse_endless(value, max_length)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer.encode_text(value)
    return tokenizer.encode_prompt(value)


def is_token_id(value: object) -> bool:
    """Returns whether the value is an int32. The engine checks it against its own vocabulary."""
    return type(value) is int and -(2**31) <= value < 2**31


def _refuse_endless(text: str, max_length: int) -> None:
    if has_more_tokens(text, max_length):
        raise ValueError(
            f"the prompt has {len(text):,} characters: expected less than the {max_length} tokens "
            "that fit; shorten it."
        )


def _chat(given: Mapping[str, Any], tokenizer: Tokenizer, max_length: int) -> Sequence[int]:
    messages = given["messages"]
    is_chat = isinstance(messages, list) and all(map(is_message, messages))
    if not is_chat or not messages:
        raise ValueError("messages: expected a list of chat messages, each with role and content.")
    if not isinstance(tokenizer, HuggingFaceTokenizer) or not tokenizer.has_chat_template:
        raise ValueError(
            "messages need a chat template, which this tokenizer lacks: give a prompt."
        )
    variables = template_variables(given, _wrong)
    _refuse_endless(flatten_messages(messages), max_length)
    return tokenizer.encode_prompt(messages, variables)


def _wrong(column: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{column} is {shown(value)}: expected {expected}.")
