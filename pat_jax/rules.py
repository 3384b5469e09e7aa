"""What an option's value has to be, and the one sentence where it is not."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from pat_jax.errors import UserError


class OptionError(UserError):
    """An option whose value is not allowed; the parser adds `where` the value was written."""

    def __init__(self, name: str, value: object, expected: str, where: str = ""):
        super().__init__(f"option --{name} is {value!r}{where}: expected {expected}.")
        self.name, self.value, self.expected = name, value, expected


Rule = tuple[Callable[[Any], bool], str]  # what must hold, and how to say it

POSITIVE: Rule = (lambda x: x > 0, "a positive number")
NOT_NEGATIVE: Rule = (lambda x: x >= 0, "0 or a positive number")
COUNT: Rule = (lambda x: x >= 1, "an integer of at least 1")
COUNT_OR_ZERO: Rule = (lambda x: x >= 0, "0 or a positive integer")
FRACTION: Rule = (lambda x: 0 < x < 1, "a number in (0, 1)")
GIVEN: Rule = (lambda x: x != "", "a value (it has no default here)")
LAYOUT = r"dp[1-9]\d*tp[1-9]\d*"


def matches(pattern: str, expected: str) -> Rule:
    return lambda x: re.fullmatch(pattern, x) is not None, expected


def require(is_valid: bool, name: str, value: object, expected: str) -> None:
    if not is_valid:
        raise OptionError(name, value, expected)


def check_context(lengths: Mapping[str, int], context: int, model: str) -> None:
    """Prompt and response together have to fit the model's context.

    Args:
      lengths: tokens of the longest prompt and of the longest response, in this order, by option.
      context: tokens of the longest sequence that the model is for, `ModelConfig.max_position`.
      model: its name.

    Raises:
      UserError: they do not.
    """
    (prompt, response), (prompt_tokens, response_tokens) = lengths, lengths.values()
    total, left = prompt_tokens + response_tokens, context - prompt_tokens
    if total > context:
        advice = f"take --{response} {left}" if left > 0 else f"lower both, --{prompt} first"
        raise UserError(
            f"option --{prompt} + --{response} is {prompt_tokens} + {response_tokens} = {total}: "
            f"expected at most the {context} tokens of the context of {model!r} "
            f"(max_position_embeddings in a checkpoint's config.json); {advice}."
        )


def check(config: object, names: str, rule: Rule, section: str = "") -> None:
    is_valid, expected = rule
    for name in names.split():
        value = getattr(config, name)
        require(is_valid(value), section + name, value, expected)
