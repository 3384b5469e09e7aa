"""The kinds of rows: problems, examples of supervised fine-tuning, preference pairs.

    problems    prompt, answer, and other columns for rewards
    examples    prompt + completion, or messages, or text: the first that a file has
    pairs       chosen, rejected; prompt, unless both begin with it (TRL); margin; subset

The columns of `prompt_columns.py` belong to a prompt; the case of names does not matter. Knows
columns and their valid values: every error names file, line or row, and field. Does not know file
formats (`row_files.py`), nor tokens, splits or order.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import ClassVar

from pat_jax.common.errors import UserError
from pat_jax.common.json_text import has_lone_surrogate
from pat_jax.rl.data.chat_turns import as_messages
from pat_jax.rl.data.prompt_columns import (
    ABSENT,
    PROMPT_TEXTS,
    PROMPTS,
    lookup,
    missing,
    present,
    read_prompt,
    refuse_media,
    split_pair,
    text_or_chat,
    with_system,
    without_prompt,
)
from pat_jax.rl.data.row_files import NOTHING, Record
from pat_jax.rl.data.row_report import RowReport
from pat_jax.rl.data.rows import Row, Schema, has_columns
from pat_jax.rl.text.final_answer import final_answer
from pat_jax.rl.text.math_notation import without_grouping
from pat_jax.rl.text.tokenizer import ASSISTANT, PromptText, flatten_messages

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."

# Names of the arguments that the trainer itself passes to reward functions.
RESERVED_COLUMNS = (
    *("prompts", "completions", "finish_reason"),
    *("prompt_ids", "completion_ids", "is_thinking"),
)
STATED = ("problem", "question")  # columns whose texts get `INSTRUCTION`
SOLUTION = "solution"  # the column that holds the answer or ends with it
MARK = "####"  # the mark before the answer in GSM8K's column `answer`
ANSWERS = ("answer", "reward_model.ground_truth", "ground_truth", SOLUTION)
_LARGEST = 3.4e38  # the largest float32


@dataclass(frozen=True)
class ProblemRow(Row):
    """A problem; its `text` is without an instruction."""

    prompt: PromptText
    columns: Mapping[str, object]  # all columns except the prompt's; `answer` has the answer


@dataclass(frozen=True)
class ProblemSchema(Schema[ProblemRow]):
    """
    Args:
      is_compared: whether rewards compare texts with the answer, which must then be a text or a
        number. Reward functions of the user may take a list, or need no answer.
    """

    prompt: str = ""
    answer: str = ""
    is_compared: bool = True
    has_marks: bool = False  # whether the answers of the file have a `MARK`

    ROWS: ClassVar = "problems"
    KNOWN: ClassVar = {"prompt": PROMPTS, "answer": ANSWERS}
    EXPECTED: ClassVar = f"one of {', '.join(PROMPTS)}"

    def of_file(self, records: Sequence[Record]) -> "ProblemSchema":
        found = self.found(records)
        if not found.prompt:
            raise self.lacking(records, "name the column of the prompts with --data.prompt_key")
        answers = (lookup(record.fields, found.answer) for record in records)
        has_marks = any(isinstance(answer, str) and MARK in answer for answer in answers)
        return replace(found, has_marks=has_marks and found.answer.lower() != SOLUTION)

    def row(self, record: Record, report: RowReport) -> ProblemRow | None:
        answer = self._answer(record)
        record.read.extend((self.answer, *ANSWERS))
        if answer is None:
            record.read.extend(record.fields)  # so that a row left out reports no unread columns
            report.without_answer.append(f"{record.where}, field {self.answer!r}")
            return None
        value = read_prompt(record, self.prompt)
        is_stated = isinstance(value, str) and self.prompt.rpartition(".")[2].lower() in STATED
        prompt = with_system(record, f"{value}\n{INSTRUCTION}" if is_stated else value)
        where = f"{record.where}, field {self.prompt!r}"
        text = flatten_messages(value)
        columns = self._others(record) | answer
        return ProblemRow(where, text, prompt, (), record.template_variables(), columns)

    def _others(self, record: Record) -> dict[str, object]:
        for name in RESERVED_COLUMNS:
            if name in record.fields:
                raise UserError(
                    f"{record.where}, has a field {name!r}: expected another name, because reward "
                    "functions already have an argument with this name; rename the field."
                )
        return {name: value for name, value in record.fields.items() if name != self.prompt}

    def _answer(self, record: Record) -> dict[str, object] | None:
        """Returns the columns made from the answer, or None if the row has no answer."""
        key = self.answer
        value = lookup(record.fields, key) if key else None
        if not key or (value is ABSENT and not self.is_compared):
            return {}
        if value is ABSENT:
            raise missing(record, key)
        if value is None:
            return None
        text = _as_text(value)
        if text is None and not self.is_compared:
            return {"answer": value}
        if text is None or has_lone_surrogate(text):
            raise record.complain(key, value, "text or a number, or null to leave the row out")
        if self.has_marks:
            _, mark, answer = text.rpartition(MARK)
            if not mark or not answer.strip():
                expected = f"a solution that ends in '{MARK} ' and the answer"
                raise record.complain(key, value, expected)
            return {"solution": text, "answer": without_grouping(answer.strip())}
        if key.lower() == SOLUTION:
            answer = final_answer(text) or (None if "\n" in text else text)
            return None if answer is None else {"answer": answer}
        return {"answer": text}


@dataclass(frozen=True)
class ExampleSchema(Schema[Row]):
    """Examples: a prompt and its completion or, without a prompt, a whole chat or text."""

    prompt: str = ""
    completion: str = ""
    messages: str = ""
    text: str = ""

    ROWS: ClassVar = "examples"
    KNOWN: ClassVar = {"prompt": PROMPT_TEXTS}
    EXPECTED: ClassVar = "prompt and completion, messages, or text"

    def of_file(self, records: Sequence[Record]) -> "ExampleSchema":
        found = self.found(records, prompt=PROMPT_TEXTS[:1])
        if self.completion or not (found.messages or found.text):  # else they tell more
            found = self.found(records)
        if (found.prompt and found.completion) or found.messages or found.text:
            return found
        if has_columns(records, "chosen", "rejected"):
            raise self.lacking(records, "a policy learns from pairs with --loss dpo")
        keys = "--data.prompt_key and --data.completion_key, --data.messages_key or --data.text_key"
        raise self.lacking(records, f"name your columns with {keys}")

    def row(self, record: Record, report: RowReport) -> Row:
        refuse_media(record)
        if self.prompt and self.completion:
            return self._completion(record, report)
        key = self.messages or self.text
        where = f"{record.where}, field {key!r}"
        if not self.messages:
            value = present(record, key)
            if not isinstance(value, str) or not value.strip():
                raise record.complain(key, value, "text that is not empty")
            return Row(where, value, None, [value], {})
        messages = text_or_chat(record, key)
        if isinstance(messages, str):
            raise record.complain(key, messages, "a list of chat messages")
        messages = as_messages(with_system(record, messages), "user")
        if not any(message["role"] == ASSISTANT for message in messages):
            expected = "at least one message of the assistant to learn from"
            raise record.complain(key, messages, expected)
        text = flatten_messages(messages)
        return Row(where, text, None, [messages], record.template_variables())

    def _completion(self, record: Record, report: RowReport) -> Row:
        prompt = read_prompt(record, self.prompt, is_answered=True)
        key = self.completion
        completion = text_or_chat(record, key, unpacks=not isinstance(prompt, str))
        if not isinstance(completion, str) and completion[0]["role"] != ASSISTANT:
            raise record.complain(key, completion, "a first message of the assistant")
        rest = without_prompt(prompt, [completion])
        report.num_repeating += rest[0] is not completion
        prompt = with_system(record, prompt)
        where = f"{record.where}, field {key!r}"
        text = flatten_messages(prompt)
        return Row(where, text, prompt, rest, record.template_variables())


@dataclass(frozen=True)
class PairRow(Row):
    """A pair of whole texts (without a prompt), of responses to a prompt, or of chats. The prompt
    of chats is the messages that both begin with."""

    margin: float  # by how much the reward of `chosen` should exceed that of `rejected`
    subset: str  # RewardBench's subset (accuracies are reported for each), or ""


@dataclass(frozen=True)
class PairSchema(Schema[PairRow]):
    prompt: str = ""
    chosen: str = ""
    rejected: str = ""
    margin: str = ""

    ROWS: ClassVar = "pairs"
    KNOWN: ClassVar = {"prompt": PROMPT_TEXTS}
    EXPECTED: ClassVar = "chosen and rejected"

    def of_file(self, records: Sequence[Record]) -> "PairSchema":
        found = self.found(records)
        if not found.chosen or not found.rejected:
            keys = "--data.chosen_key and --data.rejected_key"
            raise self.lacking(records, f"name those that hold them with {keys}")
        return found

    def row(self, record: Record, report: RowReport) -> PairRow:
        refuse_media(record)
        chosen, rejected = whole = self._responses(record)
        of_responses = list(record.read)
        given = None
        is_guessed = self.prompt.lower() in PROMPT_TEXTS[1:]
        if self.prompt and not (is_guessed and record.fields.get(self.prompt) in NOTHING):
            given = read_prompt(record, self.prompt, is_answered=True)
        where = f"{record.where}, fields {self.chosen!r} and {self.rejected!r}"
        split = split_pair(where, record, given, chosen, rejected, is_guessed=is_guessed)
        if not split.is_shown:
            record.read[:] = of_responses  # the prompt's columns are not used
        is_cut = split.prompt is given and whole != tuple(split.responses)
        is_repeating = given is not None and split.is_shown and (is_cut or split.prompt is None)
        prompt = with_system(record, split.prompt, given or "") if split.prompt else None
        subset = lookup(record.fields, "subset")
        record.read.append("subset")
        margin = self._margin(record)
        report.num_repeating += is_repeating
        return PairRow(
            where,
            flatten_messages(prompt or split.responses[0]),
            prompt,
            split.responses,
            record.template_variables(),
            margin,
            subset if isinstance(subset, str) else "",
        )

    def _responses(self, record: Record) -> tuple[PromptText, PromptText]:
        """Returns the two responses. Raises BadRow if they are equal, or if a chat does not end
        with an answer."""
        keys = self.chosen, self.rejected
        # A plain text may look like the JSON of a chat by chance.
        unpacks = all(str(lookup(record.fields, key)).lstrip().startswith("[") for key in keys)
        chosen, rejected = (text_or_chat(record, key, unpacks=unpacks) for key in keys)
        for key, response in zip(keys, (chosen, rejected), strict=True):
            if not isinstance(response, str) and response[-1]["role"] != ASSISTANT:
                raise record.complain(key, response, "a last message of the assistant")
        if isinstance(chosen, str) != isinstance(rejected, str):
            expected = f"text or messages as in {self.chosen!r}, of one kind"
            raise record.complain(self.rejected, rejected, expected)
        if chosen == rejected:
            expected = f"another than in {self.chosen!r}, as nothing is learned from equal ones"
            raise record.complain(self.rejected, rejected, expected)
        return chosen, rejected

    def _margin(self, record: Record) -> float:
        if not self.margin:
            return 0.0
        value = present(record, self.margin)
        if (
            isinstance(value, int | float | Decimal)
            and not isinstance(value, bool)
            and -_LARGEST <= value <= _LARGEST  # not so for NaN
        ):
            return float(value)
        raise record.complain(self.margin, value, "a finite number")


def _as_text(value: object) -> str | None:
    """Returns a text that is not blank, or a finite number as text; None for anything else."""
    if isinstance(value, str):
        return value.strip() or None
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return None
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)  # integers become floats in a column where a number is missing
    return str(value) if isinstance(value, int) or math.isfinite(value) else None
