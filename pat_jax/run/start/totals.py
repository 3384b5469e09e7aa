"""Counts what a run has drawn since it began, across resumptions; saved in each checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from pat_jax.rl.data.epochs import START, Cursor


@dataclass(frozen=True)
class Totals:
    batches: int = 0  # batches of prompts
    tokens: int = 0  # tokens of all responses and their prompts
    cursor: Cursor = START  # where the next batch begins

    def __post_init__(self):
        if min(self.batches, self.tokens, *self.cursor) < 0:
            raise ValueError("a count is below zero")

    def plus(self, tokens: int, cursor: Cursor) -> "Totals":
        """Returns the totals after one more batch of `tokens` tokens. `cursor` is where the next
        batch begins."""
        return Totals(self.batches + 1, self.tokens + tokens, cursor)

    def metrics(self, epochs: float | None) -> dict[str, float]:
        """Returns `progress/*`. `epochs` is None for problems without an end."""
        epoch = {} if epochs is None else {"progress/epoch": epochs}
        return {"progress/tokens": self.tokens, **epoch}

    def to_json(self) -> dict[str, Any]:
        drawn = {"batches_drawn": self.batches, "tokens_drawn": self.tokens}
        return drawn | {"cursor": self.cursor._asdict()}

    @classmethod
    def from_json(
        cls, meta: Mapping[str, Any], step: int, size: int, after: Callable[[int, int], Cursor]
    ) -> "Totals":
        """Reads the totals from the metadata of a checkpoint.

        Args:
          meta: metadata; old checkpoints have no totals, or no cursor.
          step: iterations done, one batch each: used if the totals are missing.
          size: prompts of a batch: used if the checkpoint does not have this option.
          after: returns the cursor after a number of batches of a number of prompts.
        """
        batches = meta.get("batches_drawn", step)
        if "cursor" in meta:
            cursor = Cursor(**meta["cursor"])
        else:
            options = yaml.safe_load(meta.get("config", "")) or {}
            cursor = after(batches, options.get("rollout", {}).get("prompts_per_step", size))
        return cls(batches, meta.get("tokens_drawn", 0), cursor)
