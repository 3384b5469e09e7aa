"""The seconds that drafts were predicted to save in a rollout, and those that they saved.

Knows numbers. Does not know who proposed the drafts.
"""

from dataclasses import dataclass, fields

from pat_jax.planning.types import BurstResult, DraftPrediction


@dataclass
class DraftSums:
    """Predicted and actual values, summed over the bursts whose drafts a planner has predicted.

    Both savings are relative to the time of steps without drafts, as the planner predicts it.
    """

    steps: int = 0
    expected_tokens: float = 0.0  # predicted tokens of a row in each step, summed over steps
    tokens: float = 0.0  # generated tokens of a row in each step, summed over steps
    predicted_saving_s: float = 0.0
    saving_s: float = 0.0

    def __add__(self, other: "DraftSums") -> "DraftSums":
        sums = (getattr(self, each.name) + getattr(other, each.name) for each in fields(self))
        return DraftSums(*sums)

    def add(self, burst: BurstResult, predicted: DraftPrediction, tokens: float) -> None:
        """Adds a burst in which a row generated `tokens` per step on average."""
        self.steps += burst.steps
        self.expected_tokens += burst.steps * predicted.tokens
        self.tokens += burst.steps * tokens
        self.predicted_saving_s += predicted.saved_s(burst.steps)
        self.saving_s += burst.steps * tokens * predicted.plain_s - burst.seconds

    @property
    def words(self) -> str:
        if not self.steps:
            return "no drafts were made: none was predicted to pay, or had room"
        return (
            f"drafts in {self.steps} steps: acceptance length {self.tokens / self.steps:.2f} "
            f"({self.expected_tokens / self.steps:.2f} predicted), saved {self.saving_s:.2f} s "
            f"({self.predicted_saving_s:.2f} predicted)"
        )
