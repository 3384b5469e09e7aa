"""Preference pairs as tokens: which tokens a loss reads, and what is left out.

Knows rows, tokens and splits. Does not know file formats (`pair_files.py`), batches or shapes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from pat_jax.rl.data.chat_turns import Marked, ended, unread_keys
from pat_jax.rl.data.example import Example
from pat_jax.rl.data.example_files import Completion
from pat_jax.rl.data.examples import ExampleReader, Read, check_has_template
from pat_jax.rl.data.limits import A_LIMIT
from pat_jax.rl.data.pair import Pair
from pat_jax.rl.data.pair_files import PairColumns, PairRow, num_shared, read_pair_file
from pat_jax.rl.data.row_report import BadRow, BadRows, RowReport
from pat_jax.rl.text.scored_text import until_padding
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer, PromptText, flatten_messages


class PairsRead(Read[Pair]):
    """The pairs read from files. The length of a pair is that of its longer text."""

    NAME = "pairs"
    TOO_LONG = "{:,} with more than {:,} tokens in a text"


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
        """Reads all files, and holds out a share of the rows, by a hash of the prompt or, if it is
        not known, of the chosen text. Raises UserError if a file or a row cannot be used."""
        found = PairsRead(self.max_length, self.option, report := RowReport(self.bad_rows))
        files = (read_pair_file(path, self.columns, report) for path in paths)
        for row in chain.from_iterable(files):
            with report.row(row.where):
                pair = self._pair(row, report)
                longest = max(len(pair.chosen), len(pair.rejected))
                if longest > self.max_length:
                    found.too_long.append(longest)
                else:
                    found.add(pair, row.text, heldout_share)
        return found

    def _pair(self, row: PairRow, report: RowReport) -> Pair:
        chosen, rejected = self._marked(row)
        chats = map(row.messages, (row.chosen, row.rejected))
        unread = (unread_keys(self.tokenizer, row.variables, chat) for chat in chats)
        report.unread.update(set[str]().union(*unread))
        if chosen.tokens == rejected.tokens:
            raise BadRow(
                f"{row.where}, are the same {len(chosen.tokens):,} tokens: expected responses that differ by "
                "more than the tokenizer or its chat template leaves out; correct this row or remove it."
            )
        texts = _example(chosen, self.is_scored), _example(rejected, self.is_scored)
        if not all(text.in_loss.any() for text in texts):
            raise BadRow(
                f"{row.where}: one is the beginning of the other, its end token included, or no turn of it is to "
                "be learned, so that it has no token of its own: expected two responses; correct or remove it."
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
    shared = num_shared(one.tokens, other.tokens)
    first, second = (
        Marked(each.tokens, [i >= shared for i in range(len(each.tokens))]) for each in (one, other)
    )
    return first, second


def _example(marked: Marked, is_scored: bool) -> Example:
    in_loss = np.array(marked.is_generated)
    in_loss[0] &= is_scored and len(in_loss) == 1  # nothing comes before it to predict it from
    return Example(np.array(marked.tokens, np.int32), in_loss)
