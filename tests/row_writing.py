"""Files of rows that tests write themselves, in every kind of file, and read again."""

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet

from pat_jax.rl.data.row_report import RowReport
from pat_jax.rl.data.rows import AnyRow, Schema, read_rows

SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet")


def write(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def write_lines(path: Path, *rows: object) -> Path:
    return write(path, "".join(f"{json.dumps(row)}\n" for row in rows))


def write_rows(path: Path, rows: Sequence[dict]) -> Path:
    """In the kind of file that the path ends in."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
        return path
    return write(path, list(rows)) if path.suffix == ".json" else write_lines(path, *rows)


def rows_of(path: Path, schema: Schema[AnyRow]) -> list[AnyRow]:
    return [row for _, row in read_rows([path], schema, RowReport())]
