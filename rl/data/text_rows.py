"""A corpus as tokens: concatenated texts, split into rows of one length.

    E t e x t E m o r e E      E: the end token
    |- row 0 -|
              |- row 1 -|      begins with the last token of row 0

Each token but the first is a target in exactly one row. Position 0 of a text is its
beginning-of-sequence token or, if the tokenizer has none, the E before the text. So tokens attend
only to their own text. If a text continues in the next row, positions begin at 0 again. Does not
know files, tokenizers or shapes of batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int, Integer

from pat_jax.rl.data.examples import Example


class TextRows(Sequence[Example]):
    """The rows of a corpus, each made on access.

    Args:
      tokens: tokens of all texts, with their end tokens.
      starts: index in `tokens` of each text's position 0.
      max_length: number of tokens of a row; the last row may have fewer.
      num_bytes: number of bytes of all texts in UTF-8.
    """

    def __init__(
        self,
        tokens: Integer[np.ndarray, " tokens"],
        starts: Int[np.ndarray, " texts"],
        max_length: int,
        num_bytes: int = 0,
    ):
        self.tokens = tokens
        self.starts = starts
        self.max_length = max_length
        self.num_bytes = num_bytes

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
