"""What a run has drawn since it began, its resumptions included: part of each checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Totals:
    batches: int = 0  # of prompts
    tokens: int = 0  # of each response and its prompt

    def plus(self, tokens: int) -> "Totals":
        """With one more batch, of so many tokens."""
        return Totals(self.batches + 1, self.tokens + tokens)

    def metrics(self, batches_per_epoch: int | None) -> dict[str, float]:
        """`progress/*`; problems without an end have no epoch."""
        epoch = {"progress/epoch": self.batches / batches_per_epoch} if batches_per_epoch else {}
        return {"progress/tokens": self.tokens, **epoch}

    def to_json(self) -> dict[str, int]:
        return {"batches_drawn": self.batches, "tokens_drawn": self.tokens}

    @classmethod
    def from_json(cls, meta: Mapping[str, Any], step: int) -> "Totals":
        """
        Args:
          meta: of a checkpoint; one that was written before there were totals has none of them.
          step: the iterations it has behind it: of a batch each, where no batches were added.
        """
        return cls(meta.get("batches_drawn", step), meta.get("tokens_drawn", 0))
