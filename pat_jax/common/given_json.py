"""Converts values that a program gives into JSON text. Knows what JSON can hold."""

import json
from collections.abc import Mapping
from typing import Any

from pat_jax.common.errors import UserError, shown


def json_line(where: str, row: object) -> str:
    """Returns the row as a JSON line. Raises UserError if the row is not a dictionary of
    columns, or if JSON cannot hold a value. `where` is the row's place."""
    if not isinstance(row, Mapping) or not row:
        raise UserError(
            f"{where}, is {shown(row)}: expected a dictionary of columns, such as prompt and "
            "answer; correct this row."
        )
    fields = []
    for name, value in row.items():
        try:
            if not isinstance(name, str):
                raise TypeError
            text = json.dumps(value, default=_plain, allow_nan=False)
        except (TypeError, ValueError, OverflowError, RecursionError):
            raise UserError(
                f"{where}, column {shown(name)}, is {shown(value)}: expected text, finite numbers, "
                "true or false, None, or lists and dictionaries of these, under a name that is "
                "text; convert it, or remove the column."
            ) from None
        fields.append(f"{json.dumps(name)}: {text}")
    return f"{{{', '.join(fields)}}}\n"


def _plain(value: Any) -> object:
    """Converts an array or number of NumPy, JAX or PyTorch, or a mapping, for JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError
