"""One preference pair, as tokens."""

import zlib
from dataclasses import dataclass

import numpy as np

from pat_jax.rl.data.example import Example


@dataclass(frozen=True)
class Pair:
    """Two texts that begin alike, of which one is preferred.

    `in_loss` marks the tokens that a loss reads: of a reward model the last one, of a policy those
    of the response.
    """

    chosen: Example
    rejected: Example
    margin: float = 0.0  # by how much the chosen text's reward is to exceed the other's
    subset: str = ""  # of a benchmark, by name

    def __len__(self) -> int:
        """The number of tokens of both."""
        return len(self.chosen) + len(self.rejected)

    def checksum(self, found: int = 0) -> int:
        """Returns the CRC-32 of tokens, `in_loss` and margin, going on from `found`."""
        of_both = self.rejected.checksum(self.chosen.checksum(found))
        return zlib.crc32(np.float64(self.margin).tobytes(), of_both) if self.margin else of_both
