"""Rules for the values of options, and the error for a value that breaks one.

Every number has an upper bound, beyond which a value has no meaning or cannot be served.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from pat_jax.common.errors import UserError, shown


class OptionError(UserError):
    """An option has a value that is not allowed. The parser adds `where` it was written."""

    def __init__(self, name: str, value: object, expected: str, where: str = ""):
        super().__init__(f"option --{name} is {shown(value)}{where}: expected {expected}.")
        self.name = name
        self.value = value
        self.expected = expected


Rule = tuple[Callable[[Any], bool], str]  # the check, and what it expects in words

MOST = 2**31 - 1  # the largest 32-bit integer


def count(least: int, most: int = MOST) -> Rule:
    return lambda x: least <= x <= most, f"an integer from {least} to {most:,}"


def positive(most: float) -> Rule:
    return lambda x: 0 < x <= most, f"a number above 0 and up to {most:,}"


def not_negative(most: float) -> Rule:
    return lambda x: 0 <= x <= most, f"a number from 0 to {most:,}"


COUNT, COUNT_OR_ZERO = count(1), count(0)
MOST_RESPONSES = 2**20  # of one rollout
RESPONSES = count(1, MOST_RESPONSES)
MOST_REPLAYED = 2**16  # responses of a replayed rollout: more take hours
ROLLOUTS = count(1, 1000)  # replayed one after another
TOKENS = count(1, 2**24)  # of one sequence
STEPS = count(0, 10**9)
DEVICES = count(0, 1024)
SEED = count(0, 2**32 - 1)
MEMORY_GIB = not_negative(65_536)  # of one device
LEARNING_RATE = not_negative(1)
MIN_TEMPERATURE = 1e-6  # a smaller one would overflow float32 logits
MAX_TEMPERATURE = 1000.0  # all tokens are practically equally likely long before
TEMPERATURE: Rule = (
    lambda x: x == 0 or MIN_TEMPERATURE <= x <= MAX_TEMPERATURE,
    f"0 (greedy) or a number from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}",
)
FRACTION: Rule = (lambda x: 0 < x < 1, "a number in (0, 1)")
GIVEN: Rule = (lambda x: x != "", "a value (it has no default here)")
NAMES: Rule = (all, "names that are not empty")
FRACTION_OR_ZERO: Rule = (lambda x: 0 <= x < 1, "a number in [0, 1)")
LAYOUT = r"dp[1-9]\d{0,4}tp[1-9]\d{0,4}"


def matches(pattern: str, expected: str) -> Rule:
    return lambda x: re.fullmatch(pattern, x) is not None, expected


def require(is_valid: bool, name: str, value: object, expected: str) -> None:
    if not is_valid:
        raise OptionError(name, value, expected)


def check_context(lengths: Mapping[str, int], context: int, model: str) -> None:
    """Raises UserError if prompt and response together do not fit into the model's context.
    `lengths` maps two options to numbers of tokens: of the longest prompt, then of the longest
    response. `context` is the number of tokens of the model's longest sequence."""
    prompt, response = lengths
    prompt_tokens, response_tokens = lengths.values()
    total = prompt_tokens + response_tokens
    left = context - prompt_tokens
    if total > context:
        advice = f"take --{response} {left}" if left > 0 else f"lower both, --{prompt} first"
        raise UserError(
            f"option --{prompt} + --{response} is {prompt_tokens} + {response_tokens} = {total}: "
            f"expected at most the {context} tokens of the context of {model!r} "
            f"(max_position_embeddings in a checkpoint's config.json); {advice}."
        )
