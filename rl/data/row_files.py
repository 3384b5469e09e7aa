"""Reads the rows of JSON arrays, JSON lines and Parquet files, and files of plain text.

Knows files and their errors: every message names the file, and the line or row. Does not know what
fields mean (`schemas.py`).
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pat_jax.common.errors import UserError, shown
from pat_jax.common.json_text import JsonError, parse_json
from pat_jax.rl.data.row_report import BadRow, RowReport
from pat_jax.rl.data.template_columns import TOOLS, VARIABLES, template_variables

MOST_ROWS, MOST_BYTES = 2_000_000, 2**32  # most rows, and most bytes unpacked, of a file
RECORD_FORMATS = (".json", ".jsonl", ".ndjson", ".parquet")
NOTHING = (None, "", b"", [], {})  # values of columns that a row does not use
_ROWS_AT_ONCE = 256  # rows of Parquet unpacked before their size is checked
_TABLES = (".csv", ".tsv")


@dataclass(frozen=True)
class Record:
    """One row of a file."""

    path: Path
    unit: str  # "line" or "row"
    number: int  # from 1: the line of a JSON-lines file, the position in the others
    fields: Mapping[str, object]
    read: list[str] = field(default_factory=list)  # names of columns that have been used

    @property
    def unread(self) -> list[str]:
        """Names of the columns in which the row has a value that has not been used."""
        given = (name for name, value in self.fields.items() if value not in NOTHING)
        return [name for name in given if name not in self.read]

    @property
    def where(self) -> str:
        return f"{self.path}, {self.unit} {self.number}"

    def complain(self, field: str, value: object, expected: str) -> BadRow:
        return BadRow(
            f"{self.where}, field {field!r}, is {shown(value)}: expected {expected}; correct this "
            "row or remove it."
        )

    def template_variables(self) -> dict[str, Any]:
        """Returns the variables that the row sets for the chat template, in columns that have no
        other use."""
        given = {name: value for name, value in self.fields.items() if name not in self.read}
        self.read.extend((TOOLS, VARIABLES))
        return template_variables(given, self.complain)


def read_records(
    path: Path, report: RowReport | None = None, *, of: str = "problems"
) -> list[Record]:
    """Returns every row of the file, at least one. Messages call the rows `of`. Raises UserError if
    the file cannot be read, is damaged, or has no row."""
    of_formats = (_read_json, _read_json_lines, _read_json_lines, _read_parquet)
    readers: dict[str, Callable[[Path, RowReport], Iterator[Record]]] = dict(
        zip(RECORD_FORMATS, of_formats, strict=True)
    )
    if problem := problem_of(path, readers):
        raise UserError(f"data file {path} {problem}")
    try:
        records = list(readers[path.suffix.lower()](path, report or RowReport()))
    except OSError as error:
        raise UserError(
            f"data file {path} cannot be read ({error.strerror or error}): expected a readable file; "
            "check its permissions and its disk."
        ) from None
    if not records:
        raise UserError(
            f"{path} holds no {of}: expected at least one row; check that it was written completely."
        )
    return records


def problem_of(path: Path, suffixes: Iterable[str]) -> str:
    """Returns why the path is not a file with one of these suffixes, as the end of a sentence; ""
    if it is one."""
    if path.is_dir():
        return f"is a folder: expected a file; name the files in it, such as '{path}/*.parquet'."
    if path.suffix.lower() not in suffixes:
        return (
            f"ends in {path.suffix or 'no extension'!r}: expected one of {', '.join(suffixes)}, or the "
            "name of a built-in task; convert or rename it."
        )
    if not os.path.exists(path):
        return "does not exist: expected a file; check the path."
    if not path.is_file():
        return "is a device, a pipe or a socket: expected a file; copy its content into one."
    return ""


def listed(names: Iterable[str]) -> str:
    """Returns the names of columns for a message, at most 20 of them."""
    shown_names = [name if name.isprintable() and name else repr(name) for name in names]
    more = f" and {len(shown_names) - 20} more" if len(shown_names) > 20 else ""
    return ", ".join(name[:40] for name in shown_names[:20]) + more or "none"


def _read_json(path: Path, report: RowReport) -> Iterator[Record]:
    text = _decode(path, path.read_bytes())
    try:
        values = parse_json(text) if text.strip() else []
    except JsonError as error:
        raise UserError(
            f"{path}{error.at()}, is {error}: expected an array of objects; repair the file, or name it "
            ".jsonl if each line is an object."
        ) from None
    if not isinstance(values, list):
        raise UserError(
            f"{path} is {shown(values)}: expected an array of objects at the top level; put "
            "them in one array."
        )
    for number, value in enumerate(values, start=1):
        with report.row():
            yield _record(path, "row", number, value)


def _read_json_lines(path: Path, report: RowReport) -> Iterator[Record]:
    # Split as bytes: `str.splitlines` also splits at characters that JSON allows inside a string.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            with report.row():
                try:
                    value = parse_json(_decode(path, line, number))
                except JsonError as error:
                    raise BadRow(
                        f"{path}{error.at(number)}, is {error}: expected one complete object on each "
                        "line; repair or remove the line."
                    ) from None
                yield _record(path, "line", number, value)


def _read_parquet(path: Path, report: RowReport) -> Iterator[Record]:
    import pyarrow  # only Parquet files need it
    import pyarrow.parquet

    number = num_bytes = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if len(set(names)) < len(names):
                raise ValueError("two columns have one name")
            _check_size(path, file.metadata.num_rows, 0)
            for batch in file.iter_batches(_ROWS_AT_ONCE):
                num_bytes += sum(map(_num_bytes, batch.columns))
                _check_size(path, 0, num_bytes)
                named = zip(names, batch, strict=True)
                columns = [_values(file, name, column) for name, column in named]
                for values in zip(*columns, strict=True):
                    number += 1
                    yield Record(path, "row", number, dict(zip(names, values, strict=True)))
    # Python checks what Arrow does not: text, times, decimal numbers.
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{path} is not a readable Parquet file (after {number} rows: {reason}): expected an "
            "intact one; write or download it again."
        ) from error


def _values(file: Any, name: str, column: Any) -> list[object]:
    """Returns a column's values as from a JSON file: maps become objects, UTF-8 bytes become text,
    and text declared as JSON is parsed. Raises ValueError, with the column's name, if Python has no
    such value."""
    import pyarrow

    kind = str(column.type)
    try:
        if kind.startswith("timestamp[ns"):  # Python's have microseconds
            column = column.cast(pyarrow.timestamp("us", column.type.tz), safe=False)
        values = column.to_pylist()
    except (ValueError, OverflowError) as error:
        raise ValueError(f"column {name!r} of type {kind}: {error}") from None
    leaves = map(file.schema.column, range(len(file.schema)))
    if any(leaf.path == name and leaf.logical_type.type == "JSON" for leaf in leaves):
        return [unpacked(value) for value in values]
    return [_plain(value) for value in values] if "map<" in kind or "binary" in kind else values


def unpacked(value: object) -> object:
    """Returns the parsed value of a JSON text, or any other value unchanged."""
    with suppress(JsonError):
        return parse_json(value) if isinstance(value, str | bytes) else value
    return value


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        with suppress(UnicodeDecodeError):
            return value.decode()
    if isinstance(value, list) and value and isinstance(value[0], tuple):  # a map
        value = dict(value)
    if isinstance(value, dict):
        return {_plain(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def _num_bytes(column: Any) -> int:
    """Returns the bytes of an Arrow array's values in Python, which repeats dictionary values."""
    return (column.dictionary_decode() if hasattr(column, "dictionary") else column).nbytes


def _check_size(path: Path, num_rows: int, num_bytes: int) -> None:
    """Raises UserError for too large a file: kilobytes of Parquet may unpack to many rows."""
    if num_rows > MOST_ROWS or num_bytes > MOST_BYTES:
        values = f"{num_bytes / 2**30:.1f} GiB of values and more"
        size = f"{num_rows:,} rows" if num_rows else values
        raise UserError(
            f"{path} has {size}: expected at most {MOST_ROWS:,} rows and {MOST_BYTES / 2**30:g} GiB, because "
            "the whole file is held in memory; use a part of it."
        )


def _decode(path: Path, data: bytes, line: int | None = None) -> str:
    try:
        return data.decode("utf-8-sig" if line in (None, 1) else "utf-8")
    except UnicodeDecodeError as error:
        line = line or data.count(b"\n", 0, error.start) + 1
        raise BadRow(
            f"{path}, line {line}, is not UTF-8 text ({error.reason}): expected JSON in UTF-8; "
            "convert the file."
        ) from None


def _record(path: Path, unit: str, number: int, value: object) -> Record:
    if not isinstance(value, dict):
        raise BadRow(
            f"{path}, {unit} {number}, is {shown(value)}: expected an object with fields by name; "
            "correct this row."
        )
    return Record(path, unit, number, value)


def is_text_file(path: Path) -> bool:
    """Whether a file of this name is read as one text."""
    return path.suffix.lower() not in (*RECORD_FORMATS, *_TABLES)


def read_text_file(path: Path) -> str:
    """Returns the whole file unchanged. Raises UserError if it cannot be read, is too large, or is
    not UTF-8 text."""
    if problem := problem_of(path, (path.suffix.lower(),)):
        raise UserError(f"data file {path} {problem}")
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise UserError(
                f"data file {path} has {size / 2**30:.1f} GiB: expected at most {MOST_BYTES / 2**30:g} GiB, "
                "because the whole file is held in memory; split it."
            )
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"data file {path} cannot be read ({error.strerror or error}): expected a readable file; "
            "check its permissions and its disk."
        ) from None
    try:
        text = data.decode()
        wrong = data.find(b"\0")  # UTF-16 and binary files have zeros
    except UnicodeDecodeError as error:
        text = ""
        wrong = error.start
    if wrong >= 0:
        raise UserError(
            f"data file {path} is not UTF-8 text (byte 0x{data[wrong]:02x} at offset {wrong:,}): expected "
            "plain text; convert the file, or leave it out by a pattern such as 'corpus/**/*.txt'."
        )
    return text
