"""One example of supervised fine-tuning, as tokens."""

import zlib
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int


@dataclass(frozen=True)
class Example:
    tokens: Int[np.ndarray, " length"]
    in_loss: Bool[np.ndarray, " length"]  # the first token never is: nothing predicts it
    # Position of each token in its text, from 0; a token sees only its own text. None: the example
    # is one text.
    places: Int[np.ndarray, " length"] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def positions(self) -> Int[np.ndarray, " length"]:
        return np.arange(len(self)) if self.places is None else self.places

    def checksum(self, found: int = 0) -> int:
        """Returns the CRC-32 of tokens and `in_loss`, going on from `found`."""
        return zlib.crc32(self.in_loss.tobytes(), zlib.crc32(self.tokens.tobytes(), found))
