"""Turns a corpus, text by text, into rows of tokens. Knows tokenizers and splits, no files."""

from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from jaxtyping import Integer

from pat_jax.rl.data.row_report import RowReport
from pat_jax.rl.data.splits import kept
from pat_jax.rl.data.subset import Subset, subset_of
from pat_jax.rl.data.text_rows import TextRows, TextStream
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer

PART_LENGTH = 4096  # characters


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
        for subset, parts in groupby(_parts_of(text), self._subset):
            together = list(parts)
            size = sum(len(part.encode()) for part in together)
            self._streams[subset].add(self._tokens(together), size)

    def _subset(self, part: str) -> Subset:
        return subset_of(part, self.heldout_share)

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
