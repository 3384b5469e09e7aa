"""The sampling options of one response."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from pat_jax.common.errors import shown
from pat_jax.common.rules import MAX_TEMPERATURE, MIN_TEMPERATURE

MAX_STOP_IDS = 8  # of a request, besides the engine's end-of-sequence tokens

_Rule = tuple[Callable[[Any], bool], str]  # the test of a value, and what it expects


def _number(low: float, high: float = math.inf) -> Callable[[Any], bool]:
    return lambda x: _is_a(x, Real) and low <= x <= high and math.isfinite(x)


def _count(x: Any) -> bool:
    return _is_a(x, Integral) and 0 <= x < 2**31


def _is_a(x: object, kind: type) -> bool:
    return isinstance(x, kind) and not isinstance(x, bool)


_RULES: dict[str, _Rule] = {
    "temperature": (
        lambda x: _number(0, MAX_TEMPERATURE)(x) and (x == 0 or x >= MIN_TEMPERATURE),
        f"0 (greedy) or a number from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}",
    ),
    "top_k": (_count, "0 (off) or a positive integer"),
    "top_p": (lambda x: _number(0, 1)(x) and x > 0, "a number above 0 and up to 1 (off)"),
    "min_p": (_number(0, 1), "a number from 0 (off) to 1"),
    "repetition_penalty": (
        lambda x: _number(0, 1e6)(x) and x >= 1e-6,
        "a number from 1e-6 to 1e6, 1 being off",
    ),
    "presence_penalty": (_number(-1e6, 1e6), "a number from -1e6 to 1e6, 0 being off"),
    "min_tokens": (_count, "0 or a positive integer"),
    "stop_token_ids": (
        lambda x: isinstance(x, tuple) and len(x) <= MAX_STOP_IDS and all(map(_count, x)),
        f"a tuple of up to {MAX_STOP_IDS} token ids",
    ),
    "logprobs": (_count, "0 (none) or a positive integer"),
}


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one response are sampled, and what may end it. Raises ValueError, one
    sentence that names the field, if a value is not allowed.

    Penalties change the logits first, then the temperature divides them. Then top-k, top-p and
    min-p, in this order, each filter the tokens that are left. Greedy decoding ignores filters.
    """

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # keep the k likeliest tokens (and ties with the last of them); 0 keeps all
    top_p: float = 1.0  # keep the fewest likeliest tokens with at least this probability in all
    min_p: float = 0.0  # keep tokens with at least this part of the likeliest one's probability
    # Logits of tokens in prompt or response: positive ones are divided by it, others multiplied
    # (arXiv 1909.05858, §4.1).
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the response
    min_tokens: int = 0  # no token ends the response before it has so many tokens
    stop_token_ids: tuple[int, ...] = ()  # tokens that end the response, besides the model's own
    logprobs: int = 0  # number of likeliest tokens to report with each token

    def __post_init__(self) -> None:
        for name, (is_valid, expected) in _RULES.items():
            value = getattr(self, name)
            if not is_valid(value):
                raise ValueError(f"{name} is {shown(value)}: expected {expected}.")

    @property
    def is_plain(self) -> bool:
        """Whether tokens are sampled from softmax(logits / temperature) without further changes."""
        has_filter = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        is_filtered = has_filter and self.temperature > 0
        return not (is_filtered or self.has_penalty or self.min_tokens)

    @property
    def has_penalty(self) -> bool:
        """Whether probabilities depend on which tokens have occurred."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0


PLAIN = Sampling()  # from the model's own distribution
