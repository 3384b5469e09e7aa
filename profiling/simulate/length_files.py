"""Files of response lengths: CSV, JSON or JSON lines; one response an entry, or a histogram.

An entry is a whole number of tokens, or has it under one of `LENGTHS`. With one of `COUNTS` beside it the
entry stands for so many responses; one of `PROMPTS` says how long the prompt was. What
`python -m pat_jax.generate` writes can be read as it is. Responses of no token are left out.
"""

import csv
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pat_jax.common.errors import UserError, shown
from pat_jax.common.json_text import JsonError, parse_json
from pat_jax.profiling.simulate.response_lengths import BUILT_IN, ResponseLengths

LENGTHS = (
    "output_tokens",
    "completion_tokens",
    "response_tokens",
    "generated_tokens",
    "length",
)
COUNTS = ("count", "weight", "weight_requests")
PROMPTS = ("prompt_tokens", "input_tokens", "context_tokens")
MOST_TOKENS, MOST_COUNT = 2**31 - 1, 10**15
USAGE = "usage"  # of a line of `pat_jax.generate`


class LengthEntry(NamedTuple):
    line: int
    length: Any
    count: Any = 1
    prompt: Any = None


def find_lengths(name: str) -> ResponseLengths:
    """The built-in distribution or the file of that name.

    Raises:
      UserError: neither is there, or the file does not hold lengths.
    """
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
    """
    Raises:
      UserError: the file cannot be read, has no entries, or one that is not a length.
    """
    readers = {".csv": _csv_entries, ".json": _json_entries, ".jsonl": _jsonl_entries}
    if path.suffix not in readers:
        raise UserError(f"lengths {path}: expected a file named .csv, .json or .jsonl.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"lengths {path}: cannot be read as text ({error}).") from None
    lengths, counts, prompts = [], [], []
    for entry in readers[path.suffix](path, text):
        lengths.append(_whole(path, entry.line, "response", entry.length))
        counts.append(_count(path, entry.line, entry.count))
        prompts.append(
            -1 if entry.prompt is None else _whole(path, entry.line, "prompt", entry.prompt)
        )
    if not lengths:
        raise UserError(
            f"lengths {path}: no rows, expected one response length, a number of tokens, in each."
        )
    return _distribution(path, np.array(lengths), np.array(counts, float), np.array(prompts))


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


def _csv_entries(path: Path, text: str) -> Iterator[LengthEntry]:
    reader = csv.reader(text.splitlines())
    try:
        rows = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except csv.Error as error:  # such as a field of more than 131,072 characters
        raise UserError(f"lengths {path}, line {reader.line_num}: {error}.") from None
    if not rows:
        return
    line, first = rows[0]
    names = [cell.strip() for cell in first]
    if len(names) == 1:
        rows = rows[1:] if _is_name(names[0]) else rows
        for line, row in rows:
            yield LengthEntry(line, row[0])
        return
    length, count, prompt = (_found(names, known) for known in (LENGTHS, COUNTS, PROMPTS))
    if length is None:
        raise UserError(
            f"lengths {path}, line {line}: columns {', '.join(names)}, expected one column alone, or "
            f"one of {', '.join(LENGTHS)} among them."
        )
    for line, row in rows[1:]:
        if len(row) != len(names):
            raise UserError(
                f"lengths {path}, line {line}: {len(row)} columns, expected the {len(names)} of the "
                "first line."
            )
        yield LengthEntry(
            line,
            row[length],
            1 if count is None else row[count],
            None if prompt is None else row[prompt],
        )


def _is_name(text: str) -> bool:
    """Whether it is the header of a column: a word, not a number gone wrong."""
    return text.isidentifier() and text.lower() not in ("nan", "inf", "infinity")


def _found(names: list[str], known: tuple[str, ...]) -> int | None:
    return next((names.index(name) for name in known if name in names), None)


def _json_entries(path: Path, text: str) -> Iterator[LengthEntry]:
    """The elements of one array, each read by itself, so that its line is known."""
    decoder, at = json.JSONDecoder(), _skip(text, 0)
    if text[at : at + 1] != "[":
        raise UserError(
            f"lengths {path}: expected one array of lengths or of objects, such as [512, 1024]."
        )
    at = _skip(text, at + 1)
    if text[at : at + 1] == "]":
        return
    while True:
        line = text.count("\n", 0, at) + 1
        try:
            element, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            raise _broken(path, line) from None
        yield _entry(path, line, element)
        at = _skip(text, at)
        end, at = text[at : at + 1], _skip(text, at + 1)
        if end == "]":
            return
        if end != ",":
            raise _broken(path, line)


def _skip(text: str, at: int) -> int:
    """The position of the next character that is no space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _jsonl_entries(path: Path, text: str) -> Iterator[LengthEntry]:
    for line, content in enumerate(text.splitlines(), start=1):
        if not content.strip():
            continue
        try:
            element = parse_json(content)
        except JsonError:
            raise _broken(path, line) from None
        yield _entry(path, line, element)


def _broken(path: Path, line: int) -> UserError:
    return UserError(f"lengths {path}, line {line}: broken JSON, expected a number or an object.")


def _entry(path: Path, line: int, element: Any) -> LengthEntry:
    if not isinstance(element, Mapping):
        return LengthEntry(line, element)
    usage = element.get(USAGE)
    fields = {**element, **(usage if isinstance(usage, Mapping) else {})}
    name = next((name for name in LENGTHS if name in fields), None)
    if name is None:
        raise UserError(
            f"lengths {path}, line {line}: fields {', '.join(fields) or 'none'}, expected one of "
            f"{', '.join(LENGTHS)}."
        )
    count = next((fields[name] for name in COUNTS if name in fields), 1)
    return LengthEntry(
        line, fields[name], count, next((fields[n] for n in PROMPTS if n in fields), None)
    )


def _number(value: Any) -> float:
    """NaN where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def _whole(path: Path, line: int, what: str, value: Any) -> int:
    number = _number(value)
    if not (0 <= number <= MOST_TOKENS and number.is_integer()):
        raise UserError(
            f"lengths {path}, line {line}: a {what} of {shown(value)} tokens, expected a whole number "
            f"from 0 to {MOST_TOKENS:,}; correct the line or leave it out."
        )
    return int(number)


def _count(path: Path, line: int, value: Any) -> float:
    number = _number(value)
    if not 0 <= number <= MOST_COUNT:
        raise UserError(
            f"lengths {path}, line {line}: {shown(value)} responses, expected a number from 0 to "
            f"{MOST_COUNT:,}."
        )
    return number
