"""What drafts are worth, by how much a row has said: texts repeat more and more while they grow.

Knows what earlier rollouts have seen at each age, and how much more or less of it comes in this one. What this
one has seen at an age is added when it has ended: it says how the rollout differs, not how ages do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pat_jax.planning.drafts import Acceptance, Drafted
from pat_jax.planning.types import Verified

# Tokens that a row has said, from which on the next age counts: two of them for each doubling.
AGES = 32 * 2.0 ** (np.arange(24) / 2)
# Runs of an age after which what was seen of it before counts half.
AGE_HALVE = 4_000.0
# Steps of single rows after which what came in this rollout counts half, and tokens of drafts with which one
# begins as if they had been predicted and come. Seen best of 500, 2,000 and 10,000.
ROLLOUT_HALVE, PRIOR_RIGHT = 500.0, 20.0
TINY = 1e-9  # tokens, where none ever came and none was predicted


@dataclass(frozen=True, eq=False)
class AcceptanceByAge:
    """`Acceptance` of rows that have said so many tokens. Until a first rollout with drafts has ended, what came
    last is expected at every age."""

    latest: Acceptance
    known: Mapping[int, Acceptance] = field(default_factory=dict)  # by the number of the age
    counted: Mapping[int, Drafted] = field(default_factory=dict)  # of this rollout
    # Tokens of drafts that were right in this rollout, and that would have been by what is known of their ages.
    came: float = PRIOR_RIGHT
    predicted: float = PRIOR_RIGHT

    @classmethod
    def unseen(cls, *, is_said: bool = False) -> "AcceptanceByAge":
        return cls(Acceptance.unseen(is_said=is_said))

    @property
    def is_said(self) -> bool:
        return self.latest.is_said

    @property
    def times(self) -> float:
        """So many times what is known of an age is right in this rollout."""
        return self.came / max(self.predicted, TINY) if self.known else 1.0

    def at(self, age: float) -> Acceptance:
        """What is known of rows that have said so many tokens: of the nearest age of which anything is."""
        (known,), _ = self.at_ages(np.array([age]))
        return known

    def at_ages(self, age: np.ndarray) -> tuple[Sequence[Acceptance], np.ndarray]:
        """What is known, each once, and which of it rows of each `age` have, int[ages]."""
        if not self.known:
            return [self.latest], np.zeros(len(age), np.int64)
        numbers = np.array(sorted(self.known))
        nearest = np.abs(_number(age)[:, None] - numbers).argmin(axis=1)
        asked, of_age = np.unique(nearest, return_inverse=True)
        return [self.known[number] for number in numbers[asked].tolist()], of_age

    def observed(self, outcome: Verified) -> "AcceptanceByAge":
        """After a burst with drafts."""
        drafted, number = outcome.drafted, int(_number(outcome.age))
        before = self.counted.get(number)
        whole = drafted if before is None else Drafted._make(map(np.add, before, drafted))
        latest, counted = self.latest.observed(drafted), {**self.counted, number: whole}
        if outcome.predicted is None:
            return replace(self, latest=latest, counted=counted)
        kept = 0.5 ** (outcome.row_steps / ROLLOUT_HALVE)
        came = kept * self.came + outcome.tokens - outcome.row_steps
        predicted = kept * self.predicted + outcome.row_steps * outcome.predicted.known
        return AcceptanceByAge(latest, self.known, counted, came, predicted)

    def of_new_rollout(self) -> "AcceptanceByAge":
        """Before its first burst: what the last one has counted is known now."""
        known, unseen = dict(self.known), Acceptance.unseen(is_said=self.is_said)
        for age, counts in self.counted.items():
            known[age] = known.get(age, unseen).observed(counts, halve=(AGE_HALVE, AGE_HALVE))
        return AcceptanceByAge(self.latest, known)


def _number(age: float | np.ndarray) -> np.ndarray:
    return np.searchsorted(AGES, age, side="right")
