"""Reads JSON files that a run has written. A file of another form gives a one-sentence error.

Knows text and dataclasses. Does not know what the files are about.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pat_jax.common.errors import UserError
from pat_jax.common.json_text import parse_json

Found = TypeVar("Found")
Key = TypeVar("Key")
Value = TypeVar("Value")
log = logging.getLogger(__name__)


def read_kept(
    path: Path, expected: str, made_of: Callable[[Any], Found], otherwise: Found | None = None
) -> Found:
    """Returns what `made_of` makes of a file's JSON value, or `otherwise` if there is no file.
    Raises UserError, naming what is `expected`, if the file is not JSON or `made_of` raises
    ValueError, TypeError, KeyError or AttributeError."""
    if otherwise is not None and not path.is_file():
        return otherwise
    try:
        return made_of(parse_json(path.read_bytes()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{path} is not as a run writes it ({type(error).__name__}: {error}): expected {expected}; "
            "begin another file by moving it away."
        ) from None


def declared(value: Found) -> Found:
    """Returns `value`, a dataclass or a named tuple. Raises TypeError if a field does not have its
    declared type."""
    if not _has_declared_types(value):
        raise TypeError("a field is of another type")
    return value


def gone_on_with(
    read: Callable[[Path], Mapping[Key, Value]], folder: Path, what: str
) -> Mapping[Key, Value]:
    """Reads an optional file of a resumed run. A damaged one is logged and counts as empty."""
    try:
        return read(folder)
    except (UserError, OSError) as error:
        log.warning("%s of before are left out: %s", what, error)
        return {}


def _has_declared_types(value: Any) -> bool:
    """Checks every field, down to plain values. An integer passes as a float; a bool passes as
    neither."""
    hints = get_type_hints(type(value))
    return all(_is(getattr(value, name), hint) for name, hint in hints.items())


def _is(value: Any, hint: Any) -> bool:
    kind = get_origin(hint) or hint
    parts = get_args(hint)
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
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        return isinstance(value, kind) and _has_declared_types(value)
    return value is None if kind in (None, NoneType) else isinstance(value, kind)
