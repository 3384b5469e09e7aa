"""JSON text that somebody else wrote: its value, or what is wrong with it in one sentence.

Imports nothing of the project. What it returns can be written, copied, shown and sent to another
process: Python does each of these by recursion, and fails where a value is nested deeply.
"""

import json
import sys
from collections.abc import Iterator, Mapping

MAX_DEPTH = 100  # objects and arrays inside each other; data and checkpoints have up to about ten


class JsonError(ValueError):
    """Says what is wrong; `line` and `column`, from 1, where that is known."""

    def __init__(self, problem: str, line: int | None = None, column: int | None = None):
        super().__init__(problem)
        self.line, self.column = line, column

    def at(self, line: int | None = None) -> str:
        """`, line 3, column 5`, as far as it is known; `line` is that of a text of one line."""
        places = (("line", line or self.line), ("column", self.column))
        return "".join(f", {name} {number}" for name, number in places if number is not None)


def parse_json(text: str | bytes) -> object:
    """The one value of the text. Raises JsonError where it is broken, nested deeper than
    `MAX_DEPTH`, has an integer longer than Python reads, or is not UTF-8."""
    try:
        value = json.loads(text.decode() if isinstance(text, bytes) else text)
    except UnicodeDecodeError as error:
        raise JsonError(f"not UTF-8 text ({error.reason})") from None
    except json.JSONDecodeError as error:
        raise JsonError(f"broken JSON ({error.msg})", error.lineno, error.colno) from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError:  # of int(), which reads no more digits
        digits = sys.get_int_max_str_digits()
        raise JsonError(f"JSON with an integer of more than {digits:,} digits") from None
    if _is_too_deep(value):
        raise _too_deep()
    return value


def _too_deep() -> JsonError:
    return JsonError(f"JSON nested more than {MAX_DEPTH} deep")


def _is_too_deep(value: object) -> bool:
    layer = [value]
    for _ in range(MAX_DEPTH):
        layer = [inner for outer in layer for inner in _inside(outer)]
        if not layer:
            return False
    return True


def _inside(value: object) -> Iterator[object]:
    """The objects and arrays right inside of one."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (inner for inner in values if isinstance(inner, dict | list))


def has_lone_surrogate(value: object) -> bool:
    """Whether a text, at any depth, has half of a character, which no tokenizer reads."""
    if isinstance(value, Mapping):
        return any(has_lone_surrogate(pair) for pair in value.items())
    if isinstance(value, list | tuple):
        return any(map(has_lone_surrogate, value))
    try:
        str(value).encode()
    except UnicodeEncodeError:
        return True
    return False
