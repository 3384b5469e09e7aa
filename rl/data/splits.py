"""The rows read from files: those to learn from, those held out, and counts of those left out.

The text of a row decides whether the row is held out: seed, file order and run do not matter. So no
run evaluates on problems that another one trained on (a run that never evaluates holds nothing
out). Knows lengths and counts. Does not know tokenizers.
"""

import hashlib
from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Generic, TypeVar

from pat_jax.rl.data.row_report import RowReport

A_LIMIT = "a limit of"  # for messages, where no option sets the limit
MOST_CHARACTERS = 256  # most characters of a token; usual vocabularies have at most half as many
Each = TypeVar("Each")


class Subset(StrEnum):
    TRAIN = "train"
    HELDOUT = "heldout"


def subset_of(text: str, heldout_share: float) -> Subset:
    """Returns HELDOUT if the text's 64-bit hash is in the lowest `heldout_share` of all hashes."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    is_heldout = int.from_bytes(digest, "big") < heldout_share * 2**64
    return Subset.HELDOUT if is_heldout else Subset.TRAIN


@dataclass
class Splits(Generic[Each]):
    """The problems, examples or pairs read from files.

    Args:
      option: name of the option that sets `max_length`.
      is_truncated: whether those longer than `max_length` are cut, not left out.
    """

    max_length: int
    option: str
    report: RowReport
    is_truncated: bool = False
    train: list[Each] = field(default_factory=list)
    heldout: list[Each] = field(default_factory=list)
    too_long: list[int | None] = field(default_factory=list)  # their lengths in tokens, if known
    num_unlearned: int = 0  # number left out because no token, after a cut, is learned

    NAME: ClassVar = "examples"
    TOO_LONG: ClassVar = "{:,} longer than {:,} tokens"

    def __str__(self) -> str:
        return f"{self.NAME}: {kept(self.train, self.heldout)}; {self.left_out}"

    def add(self, each: Each, text: str, heldout_share: float) -> None:
        """Adds an example to the rows to learn from or held out, as its row's `text` decides."""
        is_train = subset_of(text, heldout_share) is Subset.TRAIN
        (self.train if is_train else self.heldout).append(each)

    @property
    def left_out(self) -> str:
        """Words for the number of rows left out or cut, with reasons."""
        what = self.TOO_LONG.format(len(self.too_long), self.max_length)
        if self.is_truncated:
            cut = f"{self.num_unlearned:,} cut before what is learned"
            return f"cut: {what}; left out: {cut}{self.report}"
        hint = keeps_most(len(self.train) + len(self.heldout), self.too_long, self.option)
        return f"left out: {what}{hint}{self.unusable}{self.report}"

    @property
    def unusable(self) -> str:
        """A clause with the number of rows left out for other reasons than their length."""
        return f", {self.num_unlearned:,} with nothing to learn" if self.num_unlearned else ""


def has_more_tokens(text: str, count: int) -> bool:
    """Whether the text surely has more than `count` tokens, without tokenizing it.

    A tokenizer takes a second for a million characters."""
    return len(text) > MOST_CHARACTERS * count


def kept(train: Sized, heldout: Sized) -> str:
    """Returns words for the numbers of rows to learn from and held out."""
    counts = {"to learn from": len(train), "held out": len(heldout)}
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count) or "none"


def keeps_most(num_kept: int, too_long: Sequence[int | None], option: str) -> str:
    """Returns a hint for messages: the smallest limit that keeps 99 % of the rows. It is "" if the
    present limit, which keeps `num_kept`, is as good, or if too many lengths are unknown (None)."""
    known = sorted(length for length in too_long if length is not None)
    place = len(too_long) - 1 - (num_kept + len(too_long)) // 100
    return f" ({option} {known[place]} keeps 99 %)" if 0 <= place < len(known) else ""
