"""Reads preference pairs from files, by these columns:

    chosen, rejected    each a text or chat messages: the preferred response, and the other
    prompt              optional: what both answer, and the other columns of `prompt_columns.py`;
                        without them, both begin with the prompt (TRL)
    margin              optional, a number: by how much the reward of `chosen` is to be the larger
    subset              optional, a name: RewardBench gives its accuracy for each

Case does not matter. Knows columns and what may be in them: every error names file, line or row,
and field. Does not know file formats (`row_files.py`), nor tokens.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from pat_jax.common.errors import UserError
from pat_jax.rl.data.chat_turns import as_messages
from pat_jax.rl.data.columns import (
    column_names,
    find_columns,
    lookup,
    made,
    present,
    refuse_media,
    text_or_chat,
)
from pat_jax.rl.data.prompt_columns import (
    DIALOGUE,
    LETTERS,
    PROMPT_TEXTS,
    read_prompt,
    with_system,
    without_prompt,
)
from pat_jax.rl.data.row_files import NOTHING, Record, listed, read_records
from pat_jax.rl.data.row_report import BadRow, RowReport
from pat_jax.rl.text.tokenizer import ASSISTANT, ChatMessage, PromptText, flatten_messages

_LARGEST = 3.4e38  # of float32


@dataclass(frozen=True)
class PairColumns:
    """Names of the columns; `a.b` is field b of column a. Empty: the field's own name."""

    prompt: str = ""
    chosen: str = ""
    rejected: str = ""
    margin: str = ""


@dataclass(frozen=True)
class PairRow:
    """A pair of whole texts (`prompt` is None), of responses to a prompt, or of chats.

    In a pair of chats, all three are messages: those that both begin with, and what follows.
    """

    where: str  # file, line and fields
    prompt: PromptText | None
    chosen: PromptText
    rejected: PromptText
    margin: float
    subset: str
    variables: Mapping[str, Any]  # of the chat template, besides those of every chat

    def messages(self, response: PromptText) -> Sequence[ChatMessage]:
        return [*as_messages(self.prompt or [], "user"), *as_messages(response, ASSISTANT)]

    @property
    def text(self) -> str:
        """The text whose hash decides whether the pair is held out: the prompt or, if there is
        none, the chosen text."""
        return flatten_messages(self.prompt or self.chosen)


def read_pair_file(
    path: Path, columns: PairColumns | None = None, report: RowReport | None = None
) -> list[PairRow]:
    """Returns every row of the file that can be used; `columns` are those that the user has named.
    Raises UserError if the file, or a row that may not be left out, cannot be used."""
    report = report or RowReport()
    records = read_records(path, report, of="pairs")
    found = find_columns(records, columns or PairColumns(), prompt=PROMPT_TEXTS)
    if not found.chosen or not found.rejected:
        raise UserError(
            f"{path} has the columns {listed(column_names(records))}: expected chosen and rejected; "
            "name those that hold them with --data.chosen_key and --data.rejected_key."
        )
    return list(made(partial(_row, names=found, report=report), records, report))


def _row(record: Record, names: PairColumns, report: RowReport) -> PairRow:
    refuse_media(record)
    keys = names.chosen, names.rejected
    # One text may happen to be JSON of a chat.
    is_json = all(str(lookup(record.fields, key)).lstrip().startswith("[") for key in keys)
    chosen, rejected = (_response(record, key, is_json) for key in keys)
    of_responses = list(record.read)
    if isinstance(chosen, str) != isinstance(rejected, str):
        expected = f"text or messages as in {names.chosen!r}, of one kind"
        raise record.complain(names.rejected, rejected, expected)
    if chosen == rejected:
        expected = f"another than in {names.chosen!r}, as nothing is learned from equal ones"
        raise record.complain(names.rejected, rejected, expected)
    given, whole, is_guessed = None, (chosen, rejected), names.prompt.lower() in PROMPT_TEXTS[1:]
    if names.prompt and not (is_guessed and record.fields.get(names.prompt) in NOTHING):
        given = read_prompt(record, names.prompt, is_answered=True)
    prompt, chosen, rejected, is_shown = _split(record, names, is_guessed, given, *whole)
    if not is_shown:
        record.read[:] = of_responses  # nothing is made of the prompt's columns
    is_cut = prompt is given and whole != (chosen, rejected)
    is_repeating = given is not None and is_shown and (is_cut or prompt is None)
    prompt = with_system(record, prompt, given or "") if prompt else None
    subset = lookup(record.fields, "subset")
    record.read.append("subset")
    margin = _margin(record, names.margin) if names.margin else 0.0
    report.num_repeating += is_repeating
    return PairRow(
        f"{record.where}, fields {names.chosen!r} and {names.rejected!r}",
        prompt,
        chosen,
        rejected,
        margin,
        subset if isinstance(subset, str) else "",
        record.template_variables(),
    )


def _response(record: Record, key: str, is_json: bool) -> PromptText:
    """Refuses a chat that does not end with an answer: there would be nothing to prefer."""
    response = text_or_chat(record, key, unpacks=is_json)
    if not isinstance(response, str) and response[-1]["role"] != ASSISTANT:
        raise record.complain(key, response, "a last message of the assistant")
    return response


def _split(
    record: Record,
    names: PairColumns,
    is_guessed: bool,
    given: PromptText | None,
    chosen: PromptText,
    rejected: PromptText,
) -> Sequence[Any]:
    """Returns the prompt and what follows it in either text, in the forms of `PairRow`, and whether
    these show what was `given` as the prompt."""
    asked = flatten_messages(as_messages(given or "", "user")[-1:]).strip()
    answers = without_prompt(given or "", whole := (chosen, rejected))
    if isinstance(chosen, str) or isinstance(rejected, str):
        both = str(chosen)[: num_shared(chosen, rejected)]
        is_copy = answers is whole and DIALOGUE.search(both) and (is_guessed or asked in both)
        if is_copy if given else re.sub(f"{LETTERS}$", "", both).strip():
            return None, chosen, rejected, asked in both
    elif not given or not chosen[0]["role"] == rejected[0]["role"] == ASSISTANT:
        # Whole chats. If there is a prompt as well, it is a copy of how they begin.
        one, other = (
            [(x["role"], x["content"], x.get("tool_calls")) for x in chat[:-1]]
            for chat in (chosen, rejected)
        )
        shared = num_shared(one, other)
        prompt, later = chosen[:shared], (chosen[shared:], rejected[shared:])
        if shared and all(each[0]["role"] == ASSISTANT for each in later):
            return prompt, *later, asked in flatten_messages(prompt)
        given = None
    if given is None:
        raise BadRow(
            f"{record.where}, fields {names.chosen!r} and {names.rejected!r}, begin with no prompt in "
            f"common, and no column is known to hold it (there are {listed(record.fields)}): expected "
            "two responses to one prompt; name its column with --data.prompt_key."
        )
    return given, *answers, True


def num_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Returns how many elements two sequences begin with in common."""
    both = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))


def _margin(record: Record, key: str) -> float:
    value = present(record, key)
    if (
        isinstance(value, int | float | Decimal)
        and not isinstance(value, bool)
        and -_LARGEST <= value <= _LARGEST  # not so for NaN
    ):
        return float(value)
    raise record.complain(key, value, "a finite number")
