"""Counts what a run has drawn since it began, across resumptions; saved in each checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pat_jax.common.json_text import of_json
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
    def from_json(cls, meta: Mapping[str, Any]) -> "Totals":
        """Reads the totals from the metadata of a checkpoint."""
        drawn = {"batches": meta["batches_drawn"], "tokens": meta["tokens_drawn"]}
        return of_json(cls, drawn | {"cursor": meta["cursor"]})
