"""Parses JSON text from others, with errors of one sentence.

Limits the depth of values: Python writes, copies, prints and pickles them by recursion, which fails
for deep nesting.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pat_jax.common.errors import UserError

MAX_DEPTH = 100  # objects and arrays inside each other; data and checkpoints have up to about ten


class JsonError(ValueError):
    """A mistake in JSON text. `line` and `column` count from 1, and are None if not known."""

    def __init__(self, problem: str, line: int | None = None, column: int | None = None):
        super().__init__(problem)
        self.line = line
        self.column = column

    def at(self, line: int | None = None) -> str:
        """Returns the mistake's place, such as `, line 3, column 5`, as far as it is known. If the
        text was one line of a file, `line` is the line's number there."""
        places = (("line", line or self.line), ("column", self.column))
        return "".join(f", {name} {number}" for name, number in places if number is not None)


def parse_json(text: str | bytes) -> object:
    """Returns the value of the text. Raises JsonError if it is not valid JSON or UTF-8, is nested
    deeper than `MAX_DEPTH`, or has an integer longer than Python reads."""
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


def read_json_object(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises UserError if the file is not one JSON object; the
    message names the line of the mistake."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: it is no file, expected one JSON object; download it again.")
    where = ""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        what = f"the file holds a JSON {type(content).__name__}"
    except JsonError as error:
        content = None
        where = error.at()
        what = str(error)
    except OSError as error:
        raise UserError(f"{path}: the file cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        content = None
        what = f"byte {error.start} is not UTF-8 text"
    if not isinstance(content, dict):
        raise UserError(
            f"{path}{where}: {what}, expected one JSON object; repair the file or download it again."
        )
    return content


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
    """Yields the objects and arrays that are direct members of a value."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (inner for inner in values if isinstance(inner, dict | list))


def has_lone_surrogate(value: object) -> bool:
    """Returns whether a text in the value, at any depth, has half of a surrogate pair, which no
    tokenizer reads."""
    if isinstance(value, Mapping):
        return any(has_lone_surrogate(pair) for pair in value.items())
    if isinstance(value, list | tuple):
        return any(map(has_lone_surrogate, value))
    try:
        str(value).encode()
    except UnicodeEncodeError:
        return True
    return False


Kind = TypeVar("Kind")


def of_json(kind: type[Kind], content: Mapping[str, Any]) -> Kind:
    """Returns the dataclass or named tuple whose fields `content` has by name, as JSON writes them.
    Raises ValueError, TypeError, KeyError or AttributeError if a field is missing, unknown, or of
    another type than it is declared with. An integer passes as a float; None passes as a default
    that is None."""
    hints = get_type_hints(kind)
    found = dict(content)
    for name, value in content.items():
        if value is not None or getattr(kind, name, "no default") is not None:
            found[name] = _value(hints[name], value)
    return kind(**found)


def _value(kind: Any, content: Any) -> Any:
    """Converts a value read from JSON to `kind`, the annotation of its field."""
    origin: Any = get_origin(kind) or kind
    parts = get_args(kind)
    if origin in (Union, UnionType):
        one, *_ = (part for part in parts if (part is NoneType) == (content is None))
        return _value(one, content)
    if is_dataclass(origin) or hasattr(origin, "_fields"):
        return of_json(origin, content)  # pyright: ignore[reportArgumentType]
    if origin is tuple and isinstance(content, list | tuple):
        kinds = parts[:1] * len(content) if parts[1:] == (...,) else parts
        return tuple(_value(each, x) for each, x in zip(kinds, content, strict=True))
    if origin in (int, float):
        is_kind = isinstance(content, int | origin) and not isinstance(content, bool)
        is_kind = is_kind and (not isinstance(content, int) or abs(content) < 2**63)
    elif origin is Literal:
        is_kind = content in parts
    else:
        is_kind = isinstance(content, origin)
    if not is_kind:
        raise TypeError("a field is of another type")
    if isinstance(content, list):
        return [_value(parts[0], x) for x in content]
    if isinstance(content, dict):
        return {name: _value(parts[1], x) for name, x in content.items()}
    return content
