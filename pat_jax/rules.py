"""What an option's value has to be, and the one sentence where it is not."""

import re
from collections.abc import Callable
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


def check(config: object, names: str, rule: Rule, section: str = "") -> None:
    is_valid, expected = rule
    for name in names.split():
        value = getattr(config, name)
        require(is_valid(value), section + name, value, expected)
