"""Reads JSON files that a run has written. A file of another form gives a one-sentence error.

Knows text. Does not know what the files are about.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

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


def gone_on_with(
    read: Callable[[Path], Mapping[Key, Value]], folder: Path, what: str
) -> Mapping[Key, Value]:
    """Reads an optional file of a resumed run. A damaged one is logged and counts as empty."""
    try:
        return read(folder)
    except (UserError, OSError) as error:
        log.warning("%s of before are left out: %s", what, error)
        return {}
