"""Turns a corpus into tokens: concatenated texts, split into rows of one length.

    E t e x t E m o r e E      E: the end token
    |- row 0 -|
              |- row 1 -|      begins with the last token of row 0

Each token but the first is a target in exactly one row. Position 0 of a text is its
beginning-of-sequence token or, if the tokenizer has none, the E before the text. So tokens attend
only to their own text. If a text continues in the next row, positions begin at 0 again. Knows
tokenizers and splits. Does not know files or shapes of batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

import numpy as np
from jaxtyping import Int, Integer

from pat_jax.rl.data.examples import Example
from pat_jax.rl.data.row_report import RowReport
from pat_jax.rl.data.splits import Subset, kept, subset_of
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer

PART_LENGTH = 4096  # characters


@dataclass(frozen=True, eq=False)
class TextRows(Sequence[Example]):
    """The rows of a corpus, each made on access."""

    tokens: Integer[np.ndarray, " tokens"]  # of all texts, with their end tokens
    starts: Int[np.ndarray, " texts"]  # index in `tokens` of each text's position 0
    max_length: int  # number of tokens of a row; the last row may have fewer
    num_bytes: int = 0  # number of bytes of all texts in UTF-8

    @property
    def num_targets(self) -> int:
        """Number of tokens that are learned in an epoch: all tokens of the corpus but the first."""
        return max(0, len(self.tokens) - 1)

    @property
    def tokens_per_byte(self) -> float:
        """Number of targets per byte, which turns a loss in bits per token into bits per byte."""
        return self.num_targets / max(1, self.num_bytes)

    def __len__(self) -> int:
        return -(-self.num_targets // (self.max_length - 1))

    def __getitem__(self, index: int) -> Example:  # pyright: ignore[reportIncompatibleMethodOverride]
        begin = range(len(self))[index] * (self.max_length - 1)
        tokens = self.tokens[begin : begin + self.max_length].astype(np.int32)
        columns = np.arange(len(tokens), dtype=np.int32)
        first, last = np.searchsorted(self.starts, [begin, begin + len(tokens)])
        inside = self.starts[first:last] - begin
        origin = np.zeros(len(tokens), np.int32)
        origin[inside] = inside
        return Example(tokens, columns > 0, columns - np.maximum.accumulate(origin))


@dataclass
class TextStream:
    """Concatenates texts.

    Args:
      beginning: tokens that the tokenizer puts before a text, if any.
      end: the token that ends a text.
      dtype: a dtype that holds every token.
    """

    beginning: Sequence[int]
    end: int
    dtype: np.dtype
    num_bytes: int = 0
    _length: int = 0
    _parts: list[np.ndarray] = field(default_factory=list)
    _starts: list[int] = field(default_factory=list)

    def add(self, text: Integer[np.ndarray, " _"], num_bytes: int) -> None:
        """Adds a text of at least one token, which has `num_bytes` bytes in UTF-8."""
        count = len(self.beginning)
        end = np.array([self.end])
        begins = count > 0 and tuple(text[:count]) == tuple(self.beginning)
        if not begins and not self._length:
            self._append(end)
        self._starts.append(self._length - (not begins))
        self._append(text)
        if text[-1] != self.end:
            self._append(end)
        self.num_bytes += num_bytes

    def _append(self, tokens: np.ndarray) -> None:
        self._parts.append(tokens.astype(self.dtype))
        self._length += len(tokens)

    def rows(self, max_length: int) -> TextRows:
        """Returns all texts so far, in rows of `max_length` tokens."""
        tokens = np.concatenate(self._parts or [np.zeros(0, self.dtype)])
        return TextRows(tokens, np.array(self._starts, np.int64), max_length, self.num_bytes)


@dataclass(frozen=True)
class TextRead:
    """The rows made from a corpus."""

    train: TextRows
    heldout: TextRows
    num_texts: int
    num_blank: int  # number of files left out because they have only spaces
    report: RowReport = field(default_factory=RowReport)

    def __str__(self) -> str:
        num_tokens = self.train.num_targets + self.heldout.num_targets
        rows = f"rows of {self.train.max_length:,}: {kept(self.train, self.heldout)}"
        return f"texts: {self.num_texts:,} with {num_tokens:,} tokens; {rows}; left out: {self.num_blank:,} blank{self.report}"


@dataclass
class TextReader:
    """Takes texts one at a time, and keeps their tokens as arrays.

    A long text is split into parts of up to `PART_LENGTH` characters, at the end of a line if
    possible. Each part is tokenized, and held out or not, separately. Consecutive parts in the same
    subset become one text.

    Args:
      heldout_share: share of the parts to hold out. It depends only on a part's text whether the
        part is held out.
    """

    tokenizer: HuggingFaceTokenizer
    heldout_share: float
    num_texts: int = 0
    num_blank: int = 0
    _streams: dict[Subset, TextStream] = field(default_factory=dict)

    def __post_init__(self):
        dtype = np.dtype(np.uint16 if self.tokenizer.vocab_size <= 2**16 else np.int32)
        beginning = self.tokenizer.special.beginning
        end, *_ = self.tokenizer.eos_ids
        self._streams = {subset: TextStream(beginning, end, dtype) for subset in Subset}

    def add(self, text: str) -> None:
        """Adds a text, or only counts it if it is blank."""
        if not text.strip():
            self.num_blank += 1
            return
        self.num_texts += 1
        of_part = partial(subset_of, heldout_share=self.heldout_share)
        for subset, parts in groupby(_parts_of(text), of_part):
            together = list(parts)
            size = sum(len(part.encode()) for part in together)
            self._streams[subset].add(self._tokens(together), size)

    def _tokens(self, parts: list[str]) -> Integer[np.ndarray, " _"]:
        if self.tokenizer.is_bytes:
            return np.frombuffer("".join(parts).encode(), np.uint8)
        first, *others = parts
        tokens = [self.tokenizer.encode_text(first), *map(self.tokenizer.encode, others)]
        return np.concatenate([np.array(each, np.int32) for each in tokens])

    def result(self, max_length: int) -> TextRead:
        """Returns all texts so far, in rows of `max_length` tokens."""
        train, heldout = (
            self._streams[subset].rows(max_length) for subset in (Subset.TRAIN, Subset.HELDOUT)
        )
        return TextRead(train, heldout, self.num_texts, self.num_blank)


def _parts_of(text: str) -> list[str]:
    parts = []
    start = 0
    while start < len(text):
        stop = start + PART_LENGTH
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        parts.append(text[start:stop])
        start = stop
    return parts
