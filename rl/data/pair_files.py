"""Reads preference pairs from files, by these columns:

    chosen, rejected    each a text or chat messages: the preferred response, and the other
    prompt              optional: what both answer; without it, both begin with the prompt (TRL)
    margin              optional, a number: by how much the reward of `chosen` is to be the larger
    subset              optional, a name: RewardBench gives its accuracy for each

Case does not matter. Knows columns and what may be in them: every error names file, line or row,
and field. Does not know file formats (`row_files.py`), nor tokens.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pat_jax.common.errors import UserError
from pat_jax.rl.data.chat_turns import as_messages
from pat_jax.rl.data.columns import (
    check_distinct,
    column_names,
    find_column,
    lookup,
    present,
    refuse_media,
    text_or_chat,
)
from pat_jax.rl.data.row_files import Record, listed, read_records
from pat_jax.rl.text.tokenizer import ASSISTANT, PromptText, flatten_messages


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

    @property
    def text(self) -> str:
        """The text whose hash decides whether the pair is held out: the prompt or, if there is
        none, the chosen text."""
        return flatten_messages(self.prompt or self.chosen)


def read_pair_file(path: Path, columns: PairColumns | None = None) -> list[PairRow]:
    """Returns every row of the file.

    Args:
      columns: the columns that the user has named.

    Raises:
      UserError: the file or one of its rows cannot be used.
    """
    records, named = read_records(path, of="pairs"), columns or PairColumns()
    found = PairColumns(
        *(
            find_column(records, getattr(named, name), (name,), f"data.{name}_key")
            for name in ("prompt", "chosen", "rejected", "margin")
        )
    )
    check_distinct(path, **vars(found))
    if not found.chosen or not found.rejected:
        raise UserError(
            f"{path} has the columns {listed(column_names(records))}: expected chosen and rejected; "
            "name those that hold them with --data.chosen_key and --data.rejected_key."
        )
    refuse_media(records)
    return [_row(record, found) for record in records]


def _row(record: Record, names: PairColumns) -> PairRow:
    chosen, rejected = (text_or_chat(record, key) for key in (names.chosen, names.rejected))
    if isinstance(chosen, str) != isinstance(rejected, str):
        expected = f"text or messages as in {names.chosen!r}, of one kind"
        raise record.complain(names.rejected, rejected, expected)
    if chosen == rejected:
        expected = (
            f"another response than in {names.chosen!r}, as nothing is learned from equal ones"
        )
        raise record.complain(names.rejected, rejected, expected)
    given = text_or_chat(record, names.prompt) if names.prompt else None
    prompt, chosen, rejected = _split(given, chosen, rejected)
    _check_answered(record, names, given, (chosen, rejected))
    subset = lookup(record.fields, "subset")
    return PairRow(
        f"{record.where}, fields {names.chosen!r} and {names.rejected!r}",
        prompt,
        chosen,
        rejected,
        _margin(record, names.margin) if names.margin else 0.0,
        subset if isinstance(subset, str) else "",
        record.template_variables(names.prompt, names.chosen, names.rejected, names.margin),
    )


def _split(
    prompt: PromptText | None, chosen: PromptText, rejected: PromptText
) -> tuple[PromptText | None, PromptText, PromptText]:
    """Returns the prompt and what follows it in either text, in the forms of `PairRow`."""
    if isinstance(chosen, str) or isinstance(rejected, str):
        if prompt is None or isinstance(prompt, str):
            return prompt, chosen, rejected
        return prompt, as_messages(chosen, ASSISTANT), as_messages(rejected, ASSISTANT)
    if prompt is not None and chosen[0]["role"] == rejected[0]["role"] == ASSISTANT:
        return as_messages(prompt, "user"), chosen, rejected
    # Whole chats. If there is a prompt as well, it is a copy of how they begin.
    most = min(len(chosen), len(rejected)) - 1  # at least one message is a response
    pairs = zip(chosen[:most], rejected[:most], strict=True)
    shared = next((i for i, (one, other) in enumerate(pairs) if one != other), most)
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _check_answered(
    record: Record,
    names: PairColumns,
    given: PromptText | None,
    responses: tuple[PromptText, PromptText],
) -> None:
    """Refuses chats that do not end with an answer: there would be nothing to prefer."""
    if given and not isinstance(given, str) and given[-1]["role"] == ASSISTANT:
        expected = "a last message that the assistant answers, not one of its own"
        raise record.complain(names.prompt, given, expected)
    for key, response in zip((names.chosen, names.rejected), responses, strict=True):
        if not isinstance(response, str) and response[-1]["role"] != ASSISTANT:
            raise record.complain(key, response, "a last message of the assistant")


def _margin(record: Record, key: str) -> float:
    value = present(record, key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise record.complain(key, value, "a finite number")
    return float(value)
