"""Whether a dataclass that was made of a file's values holds what its fields declare."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def has_declared_types(value: Any) -> bool:
    """Checks every field, down to plain values. An integer is a float as well; a bool is
    neither."""
    hints = get_type_hints(type(value))
    return all(_is(getattr(value, field.name), hints[field.name]) for field in fields(value))


def _is(value: Any, hint: Any) -> bool:
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return any(_is(value, part) for part in parts)
    if kind in (int, float):
        is_number = isinstance(value, int | kind) and not isinstance(value, bool)
        return is_number and (not isinstance(value, int) or abs(value) < 2**63)
    if kind is Literal:
        return value in parts
    if kind is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = parts[:1] * len(value) if parts[1:] == (...,) else parts
        return len(value) == len(kinds) and all(map(_is, value, kinds))
    if isinstance(kind, type) and issubclass(kind, Mapping) and parts:
        key, inner = parts
        is_kind = isinstance(value, Mapping)
        return is_kind and all(_is(k, key) and _is(x, inner) for k, x in value.items())
    if is_dataclass(kind):
        return isinstance(value, kind) and has_declared_types(value)
    return value is None if kind in (None, NoneType) else isinstance(value, kind)
