"""Files of response lengths: CSV, JSON or JSON lines; one entry per response, or a histogram.

An entry is a whole number of tokens, or has one in a field of `LENGTHS`. A field of `COUNTS` is the
number of responses that the entry stands for, one of `PROMPTS` the length of the prompt. Files of
`python -m pat_jax.generate` can be read as they are. Responses without a token are left out.
"""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pat_jax.common.errors import UserError, shown
from pat_jax.common.json_text import JsonError, parse_json
from pat_jax.profiling.simulate.response_lengths import BUILT_IN, ResponseLengths

LENGTHS = ("output_tokens", "completion_tokens", "response_tokens", "generated_tokens", "length")
COUNTS = ("count", "weight", "weight_requests")
PROMPTS = ("prompt_tokens", "input_tokens", "context_tokens")
MOST_TOKENS = 2**31 - 1
MOST_COUNT = 10**15
USAGE = "usage"  # the field with counts of tokens in files of `pat_jax.generate`
# For each entry, its position as text and its value: a number, or a mapping that has one.
Elements = Iterable[tuple[str, Any]]


def find_lengths(name: str) -> ResponseLengths:
    """Returns the built-in distribution `name`, or else the lengths in the file `name`. Raises
    UserError if there is neither, or if the file does not hold lengths."""
    if name in BUILT_IN:
        return ResponseLengths.built_in(name)
    path = Path(name)
    if not path.is_file():
        raise UserError(
            f"option --lengths is {name!r}: expected a .csv, .json or .jsonl file of response "
            f"lengths, or one of the built-in distributions {', '.join(BUILT_IN)}."
        )
    return read_lengths(path)


def read_lengths(path: Path) -> ResponseLengths:
    """Reads a file of response lengths. Raises UserError if it cannot be read, has no entries, or
    one that is not a length."""
    readers = {".csv": _of_csv, ".json": _of_json, ".jsonl": _of_json_lines}
    if path.suffix not in readers:
        raise UserError(f"lengths {path}: expected a file named .csv, .json or .jsonl.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"lengths {path}: cannot be read as text ({error}).") from None
    rows = [_row(f"lengths {path}, {where}", x) for where, x in readers[path.suffix](path, text)]
    if not rows:
        raise UserError(
            f"lengths {path}: no rows, expected one response length, a number of tokens, in each."
        )
    tokens, counts, prompts = np.array(rows).T
    return _distribution(path, tokens.astype(int), counts, prompts.astype(int))


def _distribution(
    path: Path, tokens: np.ndarray, counts: np.ndarray, prompts: np.ndarray
) -> ResponseLengths:
    counted = (tokens > 0) & (counts > 0)
    if not counted.any():
        raise UserError(
            f"lengths {path}: none of its {len(tokens)} rows is of a response with a token, expected "
            "some."
        )
    order = np.argsort(tokens[counted], kind="stable")
    tokens, counts, prompts = (column[counted][order] for column in (tokens, counts, prompts))
    source = f"{path.name}, {round(counts.sum()):,} responses"
    return ResponseLengths(source, tokens, counts, prompts if (prompts > 0).all() else None)


def _of_csv(path: Path, text: str) -> Elements:
    reader = csv.reader(text.splitlines())
    try:
        rows = [(f"line {reader.line_num}", row) for row in reader if any(map(str.strip, row))]
    except csv.Error as error:  # such as a field of more than 131,072 characters
        raise UserError(f"lengths {path}, line {reader.line_num}: {error}.") from None
    if not rows:
        return
    header, first = rows[0]
    names = [cell.strip() for cell in first]
    if len(names) == 1:
        # A header is a word, not a number gone wrong.
        is_header = names[0].isidentifier() and names[0].lower() not in ("nan", "inf", "infinity")
        yield from ((where, row[0]) for where, row in rows[is_header:])
        return
    if not set(LENGTHS) & set(names):
        raise UserError(
            f"lengths {path}, {header}: columns {', '.join(names)}, expected one column alone, or "
            f"one of {', '.join(LENGTHS)} among them."
        )
    for where, row in rows[1:]:
        if len(row) != len(names):
            raise UserError(
                f"lengths {path}, {where}: {len(row)} columns, expected the {len(names)} of the "
                "first line."
            )
        yield where, dict(reversed([*zip(names, row, strict=True)]))  # of equal names the first


def _of_json(path: Path, text: str) -> Elements:
    values = _parsed(path, text)
    if not isinstance(values, list):
        raise UserError(
            f"lengths {path}: expected one array of lengths or of objects, such as [512, 1024]."
        )
    return ((f"row {number}", value) for number, value in enumerate(values, start=1))


def _of_json_lines(path: Path, text: str) -> Elements:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield f"line {number}", _parsed(path, line, number)


def _parsed(path: Path, text: str, line: int | None = None) -> object:
    try:
        return parse_json(text)
    except JsonError as error:
        raise UserError(
            f"lengths {path}{error.at(line)}: {error}, expected numbers or objects."
        ) from None


def _row(where: str, element: Any) -> tuple[int, float, int]:
    """Returns tokens of the response, number of such responses, and the prompt's tokens or -1."""
    if not isinstance(element, Mapping):
        return _whole(where, "response", element), 1.0, -1
    usage = element.get(USAGE)
    fields = {**element, **(usage if isinstance(usage, Mapping) else {})}

    def found(names: Sequence[str], default: Any) -> Any:
        return next((fields[name] for name in names if name in fields), default)

    if not set(LENGTHS) & set(fields):
        raise UserError(
            f"{where}: fields {', '.join(fields) or 'none'}, expected one of {', '.join(LENGTHS)}."
        )
    prompt = found(PROMPTS, None)
    return (
        _whole(where, "response", found(LENGTHS, None)),
        _count(where, found(COUNTS, 1)),
        -1 if prompt is None else _whole(where, "prompt", prompt),
    )


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def _whole(where: str, what: str, value: Any) -> int:
    number = _number(value)
    if not (0 <= number <= MOST_TOKENS and number.is_integer()):
        raise UserError(
            f"{where}: a {what} of {shown(value)} tokens, expected a whole number from 0 to "
            f"{MOST_TOKENS:,}; correct the line or leave it out."
        )
    return int(number)


def _count(where: str, value: Any) -> float:
    number = _number(value)
    if not 0 <= number <= MOST_COUNT:
        raise UserError(
            f"{where}: {shown(value)} responses, expected a number from 0 to {MOST_COUNT:,}."
        )
    return number
