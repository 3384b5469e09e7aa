"""What the requests of a stream say of response lengths while others of them still run.

Knows how far each has come. Knows neither their tokens nor the engine.
"""

import numpy as np

from pat_jax.planning.lengths.model import LengthModel

GROWTH = 1.125  # times as many that have ended, until there is news again


class StreamedLengths:
    """One stream's responses, and the length model that follows from them at any moment.

    Short ones end first: alone they would make all look short. So those that run count as well, as
    cut where they are now (staggered entry: Kalbfleisch and Prentice 2002, section 3.2).
    """

    def __init__(self, before: LengthModel, count: int):
        """
        Args:
          before: what was known when the stream began; `model` starts from it each time.
          count: requests of the stream.
        """
        self.before = before
        self.tokens = np.zeros(count, int)
        self.has_ended = np.zeros(count, bool)  # by itself: what was cut has not
        self._due_at = 1

    def note(self, i: int, tokens: int, *, has_ended: bool) -> None:
        """Request i has generated so many tokens so far, and perhaps ended by itself."""
        self.tokens[i] = tokens
        self.has_ended[i] |= has_ended

    def has_news(self) -> bool:
        """So many more have ended since the last news that `model` is worth its time."""
        count = int(self.has_ended.sum())
        if count < self._due_at:
            return False
        self._due_at = int(GROWTH * count) + 1
        return True

    def model(self) -> LengthModel:
        has_begun = self.tokens > 0
        return self.before.updated(self.tokens[has_begun], ~self.has_ended[has_begun])
