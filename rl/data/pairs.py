"""Preference pairs as tokens: which tokens a loss reads, and what is left out.

Knows rows, tokens and splits. Does not know file formats (`pair_files.py`), batches or shapes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile
from pathlib import Path

import numpy as np

from pat_jax.rl.data.chat_turns import Marked, ended, unread_keys
from pat_jax.rl.data.example import Example
from pat_jax.rl.data.example_files import Completion
from pat_jax.rl.data.examples import ExampleReader, check_has_template
from pat_jax.rl.data.limits import A_LIMIT, keeps_most
from pat_jax.rl.data.pair import Pair
from pat_jax.rl.data.pair_files import PairColumns, PairRow, read_pair_file
from pat_jax.rl.data.row_report import BadRow, BadRows, RowReport
from pat_jax.rl.data.subset import Subset, subset_of
from pat_jax.rl.text.chat_template import ChatTemplateError
from pat_jax.rl.text.scored_text import until_padding
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer, PromptText, flatten_messages


@dataclass
class PairsRead:
    """The pairs read from files."""

    max_length: int
    option: str  # name of the option that sets `max_length`
    report: RowReport
    train: list[Pair] = field(default_factory=list)
    heldout: list[Pair] = field(default_factory=list)
    too_long: list[int] = field(default_factory=list)  # tokens of the longer text of those left out

    def __str__(self) -> str:
        counts = {"to learn from": len(self.train), "held out": len(self.heldout)}
        kept = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count) or "none"
        return f"pairs: {kept}; {self.left_out}"

    @property
    def left_out(self) -> str:
        """How many pairs were left out and why, in words."""
        hint = keeps_most(len(self.train) + len(self.heldout), self.too_long, self.option)
        what = f"{len(self.too_long):,} with more than {self.max_length:,} tokens in a text"
        return f"left out: {what}{hint}{self.report}"


@dataclass(frozen=True)
class PairReader:
    """Reads files as preference pairs.

    Args:
      max_length: most tokens of each of the two texts; pairs with a longer one are left out.
      is_scored: whether a reward model reads the texts: each is then all that the chat template
        writes, and its last token is in the loss. Otherwise a policy generates the responses, whose
        tokens are in the loss (`ExampleReader.marked`).
      pad_id: the reward model's `pad_token_id`: as in transformers, its score is read at the last
        token that is another one.
      option: name of the option that sets `max_length`, for messages.
      bad_rows: see `RowReport`.
    """

    tokenizer: HuggingFaceTokenizer
    max_length: int
    is_scored: bool
    columns: PairColumns | None = None
    pad_id: int | None = None
    option: str = A_LIMIT
    bad_rows: BadRows = ""

    def read(self, paths: Sequence[Path], heldout_share: float) -> PairsRead:
        """Reads all files.

        Args:
          heldout_share: share of the rows to hold out, by a hash of the prompt or, if it is not
            known, of the chosen text.

        Raises:
          UserError: a file or one of its rows cannot be used.
        """
        found = PairsRead(self.max_length, self.option, report := RowReport(self.bad_rows))
        subsets = {Subset.TRAIN: found.train, Subset.HELDOUT: found.heldout}
        files = (read_pair_file(path, self.columns, report) for path in paths)
        for row in chain.from_iterable(files):
            with report.row():
                pair = self._pair(row, report)
                longest = max(len(pair.chosen), len(pair.rejected))
                if longest > self.max_length:
                    found.too_long.append(longest)
                else:
                    subsets[subset_of(row.text, heldout_share)].append(pair)
        return found

    def _pair(self, row: PairRow, report: RowReport) -> Pair:
        try:
            chosen, rejected = self._marked(row)
            chats = map(row.messages, (row.chosen, row.rejected))
            report.count_keys(*(unread_keys(self.tokenizer, x, row.variables) for x in chats))
        except ChatTemplateError as error:
            raise BadRow(f"{row.where}: {error}") from None
        if chosen.tokens == rejected.tokens:
            raise BadRow(
                f"{row.where}, are the same {len(chosen.tokens):,} tokens: expected responses that differ by "
                "more than the tokenizer or its chat template leaves out; correct this row or remove it."
            )
        texts = _example(chosen, self.is_scored), _example(rejected, self.is_scored)
        if not all(text.in_loss.any() for text in texts):
            raise BadRow(
                f"{row.where}: one is the beginning of the other, its end token included, so that it has no "
                "token of its own to learn: expected two responses; correct this row or remove it."
            )
        return Pair(*texts, row.margin, row.subset)

    def _marked(self, row: PairRow) -> tuple[Marked, Marked]:
        if self.is_scored:
            return self._scored(row, row.chosen), self._scored(row, row.rejected)
        if row.prompt is None:
            return _apart(self._text(row, row.chosen), self._text(row, row.rejected))
        reader, prompt = ExampleReader(self.tokenizer, self.max_length), row.prompt
        chosen, rejected = (
            reader.marked(Completion(row.where, prompt, response, row.variables))
            for response in (row.chosen, row.rejected)
        )
        return chosen, rejected

    def _scored(self, row: PairRow, response: PromptText) -> Marked:
        """Returns a text as a reward model reads it, with its last token in the loss."""
        is_text = row.prompt is None or not self.tokenizer.has_chat_template
        if is_text and isinstance(response, str):
            tokens = self._text(row, flatten_messages(row.prompt or "") + response).tokens
        else:
            check_has_template(self.tokenizer, row.where)
            text = self.tokenizer.chat_text(row.messages(response), row.variables, is_closed=True)
            tokens = self.tokenizer.encode_chat(text)
        tokens = until_padding(np.array(tokens), self.pad_id).tolist()
        return Marked(tokens, [False] * (len(tokens) - 1) + [True])

    def _text(self, row: PairRow, text: PromptText) -> Marked:
        """Returns a whole text and its end, all of it in the loss."""
        assert isinstance(text, str), "chats have a prompt"
        self.tokenizer.check_template(row.variables)
        tokens = self.tokenizer.encode_text(text)
        return ended(Marked(tokens, [True] * len(tokens)), self.tokenizer.eos_ids)


def _apart(one: Marked, other: Marked) -> tuple[Marked, Marked]:
    """Takes the tokens that two texts begin with out of the loss: they are the prompt."""
    pairs = zip(one.tokens, other.tokens, strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    first, second = (
        Marked(each.tokens, [i >= shared for i in range(len(each.tokens))]) for each in (one, other)
    )
    return first, second


def _example(marked: Marked, is_scored: bool) -> Example:
    in_loss = np.array(marked.is_generated)
    in_loss[0] &= is_scored and len(in_loss) == 1  # nothing comes before it to predict it from
    return Example(np.array(marked.tokens, np.int32), in_loss)
