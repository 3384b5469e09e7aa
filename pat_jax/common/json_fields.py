"""Reads dataclasses from JSON, which has lists in place of tuples and no classes."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

Kind = TypeVar("Kind")


def of_json(kind: type[Kind], content: Mapping[str, Any]) -> Kind:
    """Returns the dataclass of which `dataclasses.asdict` made `content`."""
    hints = get_type_hints(kind)
    return kind(**{name: _value(hints[name], value) for name, value in content.items()})


def _value(kind: Any, content: Any) -> Any:
    """Converts a value read from JSON to `kind`, the annotation of its field."""
    kinds = [each for each in get_args(kind) or (kind,) if each is not NoneType]
    if get_origin(kind) is tuple:
        each = kinds[0]
        return tuple(_value(each, one) for one in content)
    if isinstance(content, Mapping) and len(kinds) == 1 and is_dataclass(kinds[0]):
        return of_json(kinds[0], content)  # pyright: ignore[reportArgumentType]
    return tuple(content) if isinstance(content, list) else content
