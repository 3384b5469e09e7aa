"""Reads problems from files, and finds the columns of prompts and answers.

The first of `PROMPTS` that a file has is the prompt (`prompt_columns.py`), and the first of
`ANSWERS` the answer; case does not matter. Knows columns and what may be in them: every error names
file, line or row, and field. Does not know file formats (`row_files.py`), nor tokens, splits or
order.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from pat_jax.common.errors import UserError
from pat_jax.common.json_text import has_lone_surrogate
from pat_jax.rl.data.columns import ABSENT, column_names, find_columns, lookup, made, missing
from pat_jax.rl.data.prompt_columns import PROMPTS, read_prompt, with_system
from pat_jax.rl.data.row_files import Record, listed, read_records
from pat_jax.rl.data.row_report import RowReport
from pat_jax.rl.rewards.final_answer import final_answer
from pat_jax.rl.rewards.math_notation import without_grouping
from pat_jax.rl.text.tokenizer import PromptText, flatten_messages

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."

# Names of arguments that the trainer itself passes to reward functions.
RESERVED_COLUMNS = (
    *("prompts", "completions", "finish_reason"),
    *("prompt_ids", "completion_ids", "is_thinking"),
)
STATED = ("problem", "question")  # columns whose texts get `INSTRUCTION`
SOLUTION = "solution"  # this column is the answer or ends in it
MARK = "####"  # stands before the answer in GSM8K's solutions, which are in its column `answer`
ANSWERS = ("answer", "reward_model.ground_truth", "ground_truth", SOLUTION)


@dataclass(frozen=True)
class Columns:
    """Names of the columns; `a.b` is field b of column a. Empty: the first known column is used."""

    prompt: str = ""
    answer: str = ""


@dataclass(frozen=True)
class Row:
    number: int  # from 1: the line of a JSON-lines file, the position in the others
    where: str  # file, line and field of the prompt
    text: str  # the problem alone, without an instruction
    prompt: PromptText  # what the policy reads
    variables: Mapping[str, Any]  # of the chat template, besides those of every prompt
    columns: Mapping[str, object]  # all columns but the prompt's; the answer is `answer`


@dataclass(frozen=True)
class ProblemFile:
    rows: Sequence[Row]
    last_number: int  # number of the last row, left out or not
    without_answer: Sequence[str]  # places where the answer is null, or not found in its solution


def read_problem_file(
    path: Path,
    columns: Columns | None = None,
    report: RowReport | None = None,
    *,
    is_compared: bool = True,
) -> ProblemFile:
    """Returns every row of the file that can be used and has an answer; `columns` are those that
    the user has named. Raises UserError if the file, or a row that may not be left out, cannot be
    used.

    Args:
      is_compared: whether rewards compare texts with the answer, which must then be a text or a
        number. Reward functions of the user may take a list, or need no answer.
    """
    report = report or RowReport()
    records = read_records(path, report)
    found = find_columns(records, columns or Columns(), prompt=PROMPTS, answer=ANSWERS)
    prompt_key, answer_key = found.prompt, found.answer
    if not prompt_key:
        raise UserError(
            f"{path} has the columns {listed(column_names(records))}: expected one of "
            f"{', '.join(PROMPTS)}; name the column of the prompts with --data.prompt_key."
        )
    answers = [lookup(record.fields, answer_key) for record in records]
    has_marks = any(isinstance(answer, str) and MARK in answer for answer in answers)
    has_marks = has_marks and answer_key.lower() != SOLUTION
    without_answer: list[str] = []

    def row(record: Record) -> Row | None:
        answer = _answer(record, answer_key, has_marks=has_marks, is_compared=is_compared)
        record.read.extend((answer_key, *ANSWERS))
        if answer is None:
            record.read.extend(record.fields)  # left out with what else it has
            without_answer.append(f"{record.where}, field {answer_key!r}")
            return None
        return _row(record, prompt_key, answer)

    rows = [row for row in made(row, records, report) if row]
    return ProblemFile(rows, records[-1].number, without_answer)


def _row(record: Record, key: str, answer: dict[str, object]) -> Row:
    value = read_prompt(record, key)
    is_stated = isinstance(value, str) and key.rpartition(".")[2].lower() in STATED
    prompt = with_system(record, f"{value}\n{INSTRUCTION}" if is_stated else value)
    where, text = f"{record.where}, field {key!r}", flatten_messages(value)
    variables = record.template_variables()
    return Row(record.number, where, text, prompt, variables, _others(record, key) | answer)


def _others(record: Record, prompt_key: str) -> dict[str, object]:
    for name in RESERVED_COLUMNS:
        if name in record.fields:
            raise UserError(
                f"{record.where}, has a field {name!r}: expected another name, because reward "
                "functions already have an argument with this name; rename the field."
            )
    return {name: value for name, value in record.fields.items() if name != prompt_key}


def _answer(
    record: Record, key: str, *, has_marks: bool, is_compared: bool
) -> dict[str, object] | None:
    """Returns the columns made from the answer; None if the row has no answer."""
    value = lookup(record.fields, key) if key else None
    if not key or (value is ABSENT and not is_compared):
        return {}
    if value is ABSENT:
        raise missing(record, key)
    if value is None:
        return None
    text = _as_text(value)
    if text is None and not is_compared:
        return {"answer": value}
    if text is None or has_lone_surrogate(text):
        raise record.complain(key, value, "text or a number, or null to leave the row out")
    if has_marks:
        _, mark, answer = text.rpartition(MARK)
        if not mark or not answer.strip():
            raise record.complain(key, value, f"a solution that ends in '{MARK} ' and the answer")
        return {"solution": text, "answer": without_grouping(answer.strip())}
    if key.lower() == SOLUTION:
        answer = final_answer(text) or (None if "\n" in text else text)
        return None if answer is None else {"answer": answer}
    return {"answer": text}


def _as_text(value: object) -> str | None:
    """Returns a text that is not blank, or a finite number as text; None for anything else."""
    if isinstance(value, str):
        return value.strip() or None
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return None
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)  # integers become 70.0 in a column where a number is missing
    return str(value) if isinstance(value, int) or math.isfinite(value) else None
