"""Turns rows into examples and preference pairs: which tokens a loss reads, and what is left out.

Knows rows, tokens and splits. Does not know columns (`schemas.py`), batches or shapes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from pat_jax.common.errors import UserError
from pat_jax.rl.data.chat_turns import (
    Marked,
    Piece,
    as_messages,
    ended,
    join_pieces,
    mark_turns,
    unread_keys,
)
from pat_jax.rl.data.examples import Example, Pair
from pat_jax.rl.data.prompt_columns import num_shared
from pat_jax.rl.data.row_files import RECORD_FORMATS, is_text_file, read_text_file
from pat_jax.rl.data.row_report import BadRow, BadRows, RowReport
from pat_jax.rl.data.rows import Row, read_rows
from pat_jax.rl.data.schemas import ExampleSchema, PairRow, PairSchema
from pat_jax.rl.data.splits import A_LIMIT, Splits
from pat_jax.rl.data.text_reader import TextRead, TextReader
from pat_jax.rl.text.scored_text import until_padding
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer, PromptText, flatten_messages


@dataclass(frozen=True)
class ExampleReader:
    """Reads files as examples, or as rows of text.

    Args:
      max_length: most tokens of an example; longer ones are left out, or cut if `is_truncated`.
        Rows of plain text have this many tokens.
      completion_only: whether the completion is learned, and not the prompt.
      assistant_only: whether only the assistant's tokens of a chat are learned.
      option: name of the option that sets `max_length`, for messages.
      bad_rows: see `RowReport`.
    """

    tokenizer: HuggingFaceTokenizer
    max_length: int
    is_truncated: bool = False
    schema: ExampleSchema = field(default_factory=ExampleSchema)
    completion_only: bool = True
    assistant_only: bool = True
    option: str = A_LIMIT
    bad_rows: BadRows = ""

    def read(self, paths: Sequence[Path], heldout_share: float) -> Splits[Example] | TextRead:
        """Reads all files, and holds out a share of the rows. Whether a row is held out depends on
        its prompt, chat or plain text alone. Raises UserError if a file or one of its rows cannot
        be used, or if some rows are plain texts and others are not."""
        report = RowReport(self.bad_rows)
        found = Splits[Example](self.max_length, self.option, report, self.is_truncated)
        texts = TextReader(self.tokenizer, heldout_share)
        forms = dict[bool, str]()  # where the first plain text is, and the first other row
        for row in self._rows(paths, report):
            is_text = row.prompt is None and isinstance(row.responses[0], str)
            forms.setdefault(is_text, row.where)
            with report.row(row.where):
                if is_text:
                    texts.add(row.text)
                elif (example := self._example(row, found)) is not None:
                    found.add(example, row.text, heldout_share)
        if len(forms) == 2:
            raise UserError(
                f"{forms[True]}, is plain text, but {forms[False]}, is an example: expected only one of the two, "
                "because plain text is cut into rows and examples are not; train on one after the other."
            )
        return replace(texts.result(self.max_length), report=report) if True in forms else found

    def _rows(self, paths: Sequence[Path], report: RowReport) -> Iterator[Row]:
        named = next((use for use, name in self.schema.named_columns().items() if name), "")
        for path in paths:
            if not is_text_file(path):
                yield from (row for _, row in read_rows([path], self.schema, report))
                continue
            if named:
                raise UserError(
                    f"option --data.{named}_key names a column, but {path} is plain text without columns: "
                    f"expected {', '.join(RECORD_FORMATS)}; leave out the option or the file."
                )
            text = read_text_file(path)
            yield Row(str(path), text, None, [text], {})

    def _example(self, row: Row, found: Splits) -> Example | None:
        """Returns a row's example, or None if the row is left out, which `found` then counts."""
        (response,) = row.responses
        only = self.assistant_only if row.prompt is None else self.completion_only
        tokens, is_learned = _generated(self.tokenizer, row, response, only=only)
        unread = unread_keys(self.tokenizer, row.variables, row.messages(response))
        found.report.unread.update(unread)
        if len(tokens) > self.max_length:
            found.too_long.append(len(tokens))
            if not self.is_truncated:
                return None
        in_loss = np.array(is_learned[: self.max_length])
        in_loss[0] = False
        if not in_loss.any():
            found.num_unlearned += 1
            return None
        return Example(np.array(tokens[: self.max_length], np.int32), in_loss)


class PairSplits(Splits[Pair]):
    """The pairs read from files. The length of a pair is that of its longer text."""

    NAME = "pairs"
    TOO_LONG = "{:,} with more than {:,} tokens in a text"


@dataclass(frozen=True)
class PairReader:
    """Reads files as preference pairs.

    Args:
      max_length: most tokens of each of the two texts; pairs with a longer one are left out.
      is_scored: whether a reward model scores the texts. A text is then all that the chat template
        writes, and its last token is in the loss. Otherwise a policy learns the responses, and all
        their tokens are in the loss.
      pad_id: the reward model's `pad_token_id`. As in transformers, the score is read at the last
        token that is not padding.
      option: name of the option that sets `max_length`, for messages.
      bad_rows: see `RowReport`.
    """

    tokenizer: HuggingFaceTokenizer
    max_length: int
    is_scored: bool
    schema: PairSchema = field(default_factory=PairSchema)
    pad_id: int | None = None
    option: str = A_LIMIT
    bad_rows: BadRows = ""

    def read(self, paths: Sequence[Path], heldout_share: float) -> PairSplits:
        """Reads all files, and holds out a share of the rows. The hash of the prompt or, without
        one, of the chosen text decides. Raises UserError if a file or a row cannot be used."""
        report = RowReport(self.bad_rows)
        found = PairSplits(self.max_length, self.option, report)
        for _, row in read_rows(paths, self.schema, report):
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
        chats = map(row.messages, row.responses)
        unread = (unread_keys(self.tokenizer, row.variables, chat) for chat in chats)
        report.unread.update(set[str]().union(*unread))
        if chosen.tokens == rejected.tokens:
            raise BadRow(
                f"{row.where}, are the same {len(chosen.tokens):,} tokens: expected responses that differ by "
                "more than the tokenizer or its chat template leaves out; correct this row or remove it."
            )
        texts = [self._example(chosen), self._example(rejected)]
        if not all(text.in_loss.any() for text in texts):
            raise BadRow(
                f"{row.where}: one is the beginning of the other, its end token included, or no turn of it is to "
                "be learned, so that it has no token of its own: expected two responses; correct or remove it."
            )
        return Pair(texts[0], texts[1], row.margin, row.subset)

    def _example(self, marked: Marked) -> Example:
        in_loss = np.array(marked.is_generated)
        # No position predicts the first token.
        in_loss[0] &= self.is_scored and len(in_loss) == 1
        return Example(np.array(marked.tokens, np.int32), in_loss)

    def _marked(self, row: PairRow) -> Sequence[Marked]:
        if self.is_scored:
            return [self._scored(row, response) for response in row.responses]
        found = [_generated(self.tokenizer, row, response) for response in row.responses]
        if row.prompt is not None:
            return found
        # The tokens that two whole texts begin with are the prompt, and not in the loss.
        shared = num_shared(found[0].tokens, found[1].tokens)
        return [Marked(x, [i >= shared for i in range(len(x))]) for x, _ in found]

    def _scored(self, row: PairRow, response: PromptText) -> Marked:
        """Returns a text as a reward model reads it, with its last token in the loss."""
        is_text = row.prompt is None or not self.tokenizer.has_chat_template
        if is_text and isinstance(response, str):
            whole = flatten_messages(row.prompt or "") + response
            tokens = _whole_text(self.tokenizer, row, whole).tokens
        else:
            _check_has_template(self.tokenizer, row.where)
            text = self.tokenizer.chat_text(row.messages(response), row.variables, is_closed=True)
            tokens = self.tokenizer.encode_chat(text)
        tokens = until_padding(np.array(tokens), self.pad_id).tolist()
        return Marked(tokens, [False] * (len(tokens) - 1) + [True])


def _generated(
    tokenizer: HuggingFaceTokenizer, row: Row, response: PromptText, *, only: bool = True
) -> Marked:
    """Returns the tokens of a row, and which are learned: those of the response and, if not `only`,
    of the prompt. Raises UserError if the row is a chat and there is no chat template, and
    ChatTemplateError if the template cannot render the chat."""
    if row.prompt is None and isinstance(response, str):
        return _whole_text(tokenizer, row, response)
    if isinstance(response, str) and not tokenizer.has_chat_template:
        tokenizer.check_template(row.variables)
        pieces = [Piece(flatten_messages(row.prompt or ""), not only), Piece(response, True)]
        joined = join_pieces(pieces, tokenizer.encode_text, tokenizer.encode)
        return ended(joined, tokenizer.eos_ids)
    _check_has_template(tokenizer, row.where)
    messages = row.messages(response)
    before = len(as_messages(row.prompt or (), "user"))
    return mark_turns(tokenizer, messages, before, row.variables, only=only)


def _whole_text(tokenizer: HuggingFaceTokenizer, row: Row, text: str) -> Marked:
    """Returns the tokens of a whole text and an end token, all of them in the loss."""
    tokenizer.check_template(row.variables)
    tokens = tokenizer.encode_text(text)
    return ended(Marked(tokens, [True] * len(tokens)), tokenizer.eos_ids)


def _check_has_template(tokenizer: HuggingFaceTokenizer, where: str) -> None:
    if not tokenizer.has_chat_template:
        raise UserError(
            f"{where}, is a chat, but {tokenizer.directory} has no chat template: expected "
            "prompt and completion as text; give such rows, or a checkpoint with a template."
        )
