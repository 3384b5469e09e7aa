"""Writes what processes send each other, and responses on disk, as JSON. Reading it unpickles
nothing and calls no function.

Writes plain values, containers and arrays, and the dataclasses, named tuples and enums of this
package. Reading sets their fields without calling a constructor. Does not know what they mean.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from enum import Enum
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from pat_jax.common.errors import UserError

# What `of_bytes` raises.
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ImportError)
_PACKAGE = "pat_jax."


def to_bytes(value: object) -> bytes:
    """Returns a value as JSON. Raises TypeError if it, or a part of it, is of a type that this
    module does not write."""
    return json.dumps(_written(value)).encode()


def of_bytes(content: bytes) -> Any:
    """Returns the value that `to_bytes` wrote as `content`. Raises one of `UNREADABLE` if `content`
    is anything else."""
    return json.loads(content, object_hook=_read)


def _written(value: Any) -> Any:
    kind = type(value)
    tag = type(value).__name__
    parts = value
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_written(one) for one in value]
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Path | UserError):
        return {"Path" if isinstance(value, Path) else "UserError": str(value)}
    if isinstance(value, dict):
        tag = "dict"
        parts = value.items()
    elif kind.__module__.startswith(_PACKAGE):
        tag = f"{kind.__module__}:{kind.__qualname__}"
        parts = _parts(value)
    elif hasattr(value, "dtype") and value.dtype != object:
        array = np.asarray(value)
        tag = "array"
        parts = (array.dtype.name, list(array.shape), array.tobytes())
    elif kind not in (tuple, set, frozenset):
        raise TypeError(f"a {kind} cannot be told to other processes")
    return {tag: [_written(one) for one in parts]}


def _parts(value: Any) -> Sequence[object]:
    if isinstance(value, Enum):
        return [value.name]
    is_tuple = isinstance(value, tuple)
    return value if is_tuple else [getattr(value, one.name) for one in fields(value)]


def _read(tagged: Mapping[str, Any]) -> Any:
    ((tag, content),) = tagged.items()
    return _READERS[tag](content) if tag in _READERS else _made(tag, content)


def _made(name: str, parts: Sequence[Any]) -> Any:
    module, _, qualified = name.partition(":")
    if not module.startswith(_PACKAGE):
        raise ValueError(f"{name} is no kind of value")
    kind = attrgetter(qualified)(import_module(module))
    if issubclass(kind, Enum):
        return kind[parts[0]]
    if issubclass(kind, tuple):
        return tuple.__new__(kind, parts)
    names = [one.name for one in fields(kind)]
    made = object.__new__(kind)
    for field, part in zip(names, parts, strict=True):
        object.__setattr__(made, field, part)  # also of what is frozen
    return made


def _array(content: Sequence[Any]) -> Any:
    dtype, shape, numbers = content
    return np.frombuffer(numbers, np.dtype(dtype)).reshape(shape)[()].copy()


_READERS = {"tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict, "array": _array}
_READERS |= {"bytes": base64.b64decode, "Path": Path, "UserError": UserError}
