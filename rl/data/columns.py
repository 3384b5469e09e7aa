"""Which column of a file holds what. Knows names, and the sentence where one is missing."""

from collections.abc import Mapping, Sequence

from pat_jax.common.errors import UserError
from pat_jax.rl.data.row_files import Record, listed

ABSENT = object()  # what a row has in a column that it has not


def find_column(records: Sequence[Record], named: str, known: Sequence[str], option: str) -> str:
    """The column that is named, or the first that is known and that any row has, or none ("").

    Args:
      named: as somebody has written it; `a.b` is field b of column a, and the case of letters does
        not matter where no column is spelt so.
      option: where it was written, as `data.prompt_key`.

    Raises:
      UserError: no row has the column that is named.
    """
    names = column_names(records)
    spelt = {name.lower(): name for name in reversed(names)}
    for key in [named] if named else known:
        key = key if key in names else spelt.get(key, key)
        if any(lookup(record.fields, key) is not ABSENT for record in records):
            return key
    if named:
        raise UserError(
            f"option --{option} is {named!r}: {records[0].path} has the columns {listed(names)}; give "
            "one of them, or column.field."
        )
    return ""


def column_names(records: Sequence[Record]) -> list[str]:
    """Those that any row has, in their order."""
    return list(dict.fromkeys(name for record in records for name in record.fields))


def lookup(fields: Mapping[str, object], key: str) -> object:
    """What a row has there, or `ABSENT`."""
    if key in fields or "." not in key:
        return fields.get(key, ABSENT)
    head, _, rest = key.partition(".")
    inner = fields.get(head)
    return lookup(inner, rest) if isinstance(inner, Mapping) else ABSENT


def missing(record: Record, key: str) -> UserError:
    """The error for a row without the column that others have."""
    return UserError(
        f"{record.where}, has no field {key!r}, which other rows have (found: "
        f"{listed(record.fields)}); add the field to this row or remove the row."
    )
