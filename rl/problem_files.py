"""Rows of problem files: JSON arrays, JSON lines and Parquet, in three formats.

    prompt  (text or chat messages) + any columns     generic
    problem, answer[, …]                              DeepScaleR
    question, answer ending in `#### N`               GSM8K

Knows files and what can be wrong with them: every complaint names file, line or row, and field.
Does not know tokens, splits or order.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pat_jax.errors import UserError
from pat_jax.rl.tokenizer import PromptText, flatten_messages

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."

# Names that the trainer itself passes to reward functions, beside the columns of the file.
RESERVED_COLUMNS = ("prompts", "completions", "finish")


@dataclass(frozen=True)
class Row:
    number: int  # from 1: the line of a JSON-lines file, the position in the others
    text: str  # the problem alone, without an instruction
    prompt: PromptText  # what the policy reads
    columns: Mapping[str, object]


@dataclass(frozen=True)
class _Record:
    """A row as the file has it."""

    path: Path
    unit: str  # "line" or "row"
    number: int
    value: object

    @property
    def where(self) -> str:
        return f"{self.path}, {self.unit} {self.number}"

    @property
    def fields(self) -> Mapping[str, object]:
        if not isinstance(self.value, dict):
            raise UserError(
                f"{self.where}, is {_excerpt(self.value)}: expected an object with fields such as "
                "prompt, or problem and answer; correct this row."
            )
        return self.value

    def require(self, field: str) -> object:
        if field not in self.fields:
            raise UserError(
                f"{self.where}, has no field {field!r}, which the first row has (found: "
                f"{', '.join(self.fields) or 'none'}); add the field to this row or remove the row."
            )
        return self.fields[field]

    def require_text(self, field: str) -> str:
        value = self.require(field)
        if not isinstance(value, str) or not value.strip():
            raise self.complain(field, "text that is not empty")
        return value

    def complain(self, field: str, expected: str) -> UserError:
        return UserError(
            f"{self.where}, field {field!r}, is {_excerpt(self.fields.get(field))}: expected "
            f"{expected}; correct this row or remove it."
        )

    def columns_without(self, *fields: str) -> dict[str, object]:
        for name in RESERVED_COLUMNS:
            if name in self.fields:
                raise UserError(
                    f"{self.where}, has a field {name!r}: expected another name, because reward "
                    "functions get their own argument of this name; rename the field."
                )
        return {name: value for name, value in self.fields.items() if name not in fields}


@dataclass(frozen=True)
class ProblemFile:
    rows: Sequence[Row]
    num_without_answer: int  # rows whose answer is null, as real files have: nothing to reward


def read_problem_file(path: str | Path, *, instruction: str = INSTRUCTION) -> ProblemFile:
    """Every row of the file that has an answer.

    `instruction` follows the text of problems and questions, whose files bring none; prompts are
    taken as they are.
    """
    path = Path(path)
    records = list(_read_records(path))
    if not records:
        raise UserError(
            f"{path} holds no problems: expected at least one row; check that it was written fully."
        )
    parse = _row_parser(records[0])
    rows = [row for record in records if (row := parse(record, instruction)) is not None]
    return ProblemFile(rows, num_without_answer=len(records) - len(rows))


def _read_records(path: Path) -> Iterator[_Record]:
    readers: dict[str, Callable[[Path], Iterator[_Record]]] = {
        ".json": _read_json,
        ".jsonl": _read_json_lines,
        ".ndjson": _read_json_lines,
        ".parquet": _read_parquet,
    }
    if path.suffix not in readers:
        raise UserError(
            f"data file {path} ends in {path.suffix or 'no extension'!r}: expected one of "
            f"{', '.join(readers)}, or the name of a built-in task; convert or rename it."
        )
    if not path.is_file():
        raise UserError(f"data file {path} does not exist: expected a file; check the path.")
    return readers[path.suffix](path)


def _read_json(path: Path) -> Iterator[_Record]:
    text = _read_text(path)
    try:
        values = json.loads(text) if text.strip() else []
    except json.JSONDecodeError as error:
        hint = "name it .jsonl if it has one object a line, or repair it"
        raise UserError(
            f"{path}, line {error.lineno}, column {error.colno}, is broken JSON ({error.msg}): "
            f"expected an array of objects; {hint}."
        ) from error
    if not isinstance(values, list):
        raise UserError(
            f"{path} is {_excerpt(values)}: expected an array of objects at the top; put the "
            "problems in one array."
        )
    for number, value in enumerate(values, start=1):
        yield _Record(path, "row", number, value)


def _read_json_lines(path: Path) -> Iterator[_Record]:
    # Not str.splitlines, which also splits at characters that JSON allows inside a string.
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{path}, line {number}, column {error.colno}, is broken JSON ({error.msg}): "
                "expected one complete object a line; repair or remove the line."
            ) from error
        yield _Record(path, "line", number, value)


def _read_parquet(path: Path) -> Iterator[_Record]:
    import pyarrow  # only Parquet files need it
    import pyarrow.parquet

    try:
        values = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{path} is not a readable Parquet file ({reason}): expected an intact one; write or "
            "download it again."
        ) from error
    for number, value in enumerate(values, start=1):
        yield _Record(path, "row", number, value)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text (byte {error.start}): expected JSON in UTF-8; convert it."
        ) from error


_RowParser = Callable[[_Record, str], Row | None]


def _row_parser(first: _Record) -> _RowParser:
    parsers: dict[str, _RowParser] = {
        "prompt": _parse_prompt_row,
        "problem": _parse_problem_row,
        "question": _parse_question_row,
    }
    for field, parse in parsers.items():
        if field in first.fields:
            return parse
    raise UserError(
        f"{first.where}, has the fields {', '.join(first.fields) or '(none)'}: expected prompt, or "
        "problem and answer (DeepScaleR), or question and answer (GSM8K); rename the fields."
    )


def _parse_prompt_row(record: _Record, instruction: str) -> Row:
    del instruction  # a prompt already says what to do
    prompt = record.require("prompt")
    if isinstance(prompt, list):
        if not prompt or not all(_is_message(message) for message in prompt):
            raise record.complain("prompt", "chat messages, each with text in role and content")
    else:
        prompt = record.require_text("prompt")
    return Row(record.number, flatten_messages(prompt), prompt, record.columns_without("prompt"))


def _parse_problem_row(record: _Record, instruction: str) -> Row | None:
    text = record.require_text("problem")
    answer = record.require("answer")
    if answer is None:
        return None
    is_number = isinstance(answer, int | float) and not isinstance(answer, bool)
    if not is_number and not (isinstance(answer, str) and answer.strip()):
        raise record.complain("answer", "text or a number, or null to leave the row out")
    columns = record.columns_without("problem") | {"answer": str(answer).strip()}
    return Row(record.number, text, _instruct(text, instruction), columns)


def _parse_question_row(record: _Record, instruction: str) -> Row | None:
    text = record.require_text("question")
    if record.require("answer") is None:
        return None
    solution = record.require_text("answer")
    _, marker, answer = solution.rpartition("####")
    answer = answer.strip().replace(",", "")
    if not marker or not answer:
        raise record.complain("answer", "a solution that ends in '#### ' and the final number")
    columns = record.columns_without("question") | {"answer": answer, "solution": solution}
    return Row(record.number, text, _instruct(text, instruction), columns)


def _instruct(text: str, instruction: str) -> str:
    return f"{text}\n{instruction}" if instruction else text


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(key), str) for key in ("role", "content")
    )


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]} … {text[-15:]}"
