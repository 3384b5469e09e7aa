"""What a run has drawn since it began, its resumptions included: the cursor of each checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pat_jax.rl.data.examples import Example


@dataclass(frozen=True)
class Drawn:
    examples: int = 0  # where the next batch begins
    tokens: int = 0

    def plus(self, examples: Sequence[Example]) -> "Drawn":
        return Drawn(self.examples + len(examples), self.tokens + sum(map(len, examples)))

    def metrics(self, epoch: int) -> dict[str, float]:
        """
        Args:
          epoch: examples of one.
        """
        return {"progress/tokens": self.tokens, "progress/epoch": self.examples / epoch}

    def to_json(self) -> dict[str, Any]:
        return {"drawn": asdict(self)}

    @classmethod
    def from_json(cls, meta: Mapping[str, Any]) -> "Drawn":
        return cls(**meta["drawn"])
