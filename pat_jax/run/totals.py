"""What a run has drawn since it began, its resumptions included: part of each checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from pat_jax.rl.data.epochs import START, Cursor


@dataclass(frozen=True)
class Totals:
    batches: int = 0  # of prompts
    tokens: int = 0  # of each response and its prompt
    cursor: Cursor = START  # where the next batch begins

    def plus(self, tokens: int, cursor: Cursor) -> "Totals":
        """With one more batch, of so many tokens; the next one begins at the cursor."""
        return Totals(self.batches + 1, self.tokens + tokens, cursor)

    def metrics(self, epochs: float | None) -> dict[str, float]:
        """`progress/*`; problems without an end have no epoch."""
        epoch = {} if epochs is None else {"progress/epoch": epochs}
        return {"progress/tokens": self.tokens, **epoch}

    def to_json(self) -> dict[str, Any]:
        drawn = {"batches_drawn": self.batches, "tokens_drawn": self.tokens}
        return drawn | {"cursor": self.cursor._asdict()}

    @classmethod
    def from_json(
        cls, meta: Mapping[str, Any], step: int, size: int, after: Callable[[int, int], Cursor]
    ) -> "Totals":
        """
        Args:
          meta: of a checkpoint; one that was written before there were totals, or cursors, has
            none.
          step: the iterations it has behind it: of a batch each, where no batches were added.
          size: prompts of its batches, where the checkpoint does not say that either.
          after: where a run is that has drawn so many batches of so many prompts.
        """
        batches = meta.get("batches_drawn", step)
        if "cursor" in meta:
            cursor = Cursor(**meta["cursor"])
        else:
            options = yaml.safe_load(meta.get("config", "")) or {}
            cursor = after(batches, options.get("rollout", {}).get("prompts_per_step", size))
        return cls(batches, meta.get("tokens_drawn", 0), cursor)
