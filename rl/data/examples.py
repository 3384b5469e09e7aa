"""Examples of supervised fine-tuning and preference pairs, as tokens, and their order in epochs."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Generic, TypeVar

import numpy as np
from jaxtyping import Bool, Int


@dataclass(frozen=True)
class Example:
    tokens: Int[np.ndarray, " length"]
    in_loss: Bool[np.ndarray, " length"]  # False for the first token, which nothing predicts
    # Position of each token in its text, from 0; a token sees only its own text. None if the
    # example is one text.
    places: Int[np.ndarray, " length"] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def positions(self) -> Int[np.ndarray, " length"]:
        return np.arange(len(self)) if self.places is None else self.places

    def checksum(self, found: int = 0) -> int:
        """Returns the CRC-32 of tokens and `in_loss`, continued from the CRC-32 `found`."""
        return zlib.crc32(self.in_loss.tobytes(), zlib.crc32(self.tokens.tobytes(), found))


@dataclass(frozen=True)
class Pair:
    """Two texts that begin alike, of which one is preferred.

    `in_loss` marks the tokens that a loss reads: the text's last token for a reward model, or the
    response's tokens for a policy.
    """

    chosen: Example
    rejected: Example
    margin: float = 0.0  # by how much the chosen text's reward should exceed the rejected one's
    subset: str = ""  # name of the benchmark's subset, or ""

    def __len__(self) -> int:
        """The number of tokens of both texts together."""
        return len(self.chosen) + len(self.rejected)

    def checksum(self, found: int = 0) -> int:
        """Returns the CRC-32 of tokens, `in_loss` and margin, continued from the CRC-32 `found`."""
        of_both = self.rejected.checksum(self.chosen.checksum(found))
        return zlib.crc32(np.float64(self.margin).tobytes(), of_both) if self.margin else of_both


Each = TypeVar("Each", bound=Example | Pair)


class Examples(Generic[Each]):
    """A fixed set of examples, or of pairs. Every epoch has each of them once, in a new random
    order."""

    def __init__(self, examples: Sequence[Each], *, seed: int):
        self._examples = examples
        self._seed = seed

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Each:
        return self._examples[index]

    def draw(self, position: int, size: int) -> list[Each]:
        """Returns the next `size` examples after `position` examples have been drawn.

        This is a pure function. The last batch of an epoch may be smaller: no batch reaches into
        the next epoch.
        """
        epoch, start = divmod(position, len(self))
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self))
        return [self._examples[index] for index in order[start : start + size].tolist()]

    @cached_property
    def checksum(self) -> int:
        """CRC-32 of the examples' tokens and of the marks which are learned, in order."""
        return reduce(lambda found, each: each.checksum(found), self._examples, 0)

    def batches_per_epoch(self, size: int) -> int:
        return -(-len(self) // size)
