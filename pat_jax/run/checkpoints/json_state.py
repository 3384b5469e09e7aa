"""Files of JSON that a run keeps for people, as it writes them, or one sentence.

Knows text and dataclasses. Does not know what the files are about.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pat_jax.common.declared_types import has_declared_types
from pat_jax.common.errors import UserError
from pat_jax.common.json_text import parse_json

Found = TypeVar("Found")
Key = TypeVar("Key")
Value = TypeVar("Value")
log = logging.getLogger(__name__)


def read_kept(
    path: Path, expected: str, made_of: Callable[[Any], Found], otherwise: Found | None = None
) -> Found:
    """
    Args:
      otherwise: what is known where there is no file.
      expected: in the file, in words.
      made_of: its content; raises ValueError, TypeError, KeyError or AttributeError where that is
        not as a run writes it.

    Raises:
      UserError: the file is not as a run writes it.
    """
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
    """A dataclass that was made of a file's values.

    Raises:
      TypeError: its fields do not hold what they declare.
    """
    if not has_declared_types(value):
        raise TypeError("a field is of another type")
    return value


def gone_on_with(
    read: Callable[[Path], Mapping[Key, Value]], folder: Path, what: str
) -> Mapping[Key, Value]:
    """What a resumed run has of a file in its folder: no run needs it, so a damaged one is as
    none."""
    try:
        return read(folder)
    except (UserError, OSError) as error:
        log.warning("%s of before are left out: %s", what, error)
        return {}
