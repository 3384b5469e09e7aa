"""A planner that never leaves sequences where they are."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from pat_jax.engine.two_stages import TwoStages
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.planning.types import Balance, Load, Outcome, Plan, Relocated, Sending, Split


@dataclass(frozen=True)
class Restless(FixedLayout):
    """Always moves a sequence of the fullest group to the emptiest one, by turns in one stage and in two."""

    moved: list[Balance] = field(default_factory=list)

    def balance(self, load: Load, plan: Plan, options, limits) -> Balance | None:
        del options, limits
        count = np.bincount(load.group, minlength=plan.split.dp)
        if count.max() == count.min():
            return None
        group = load.group.copy()
        group[np.flatnonzero(group == count.argmax())[0]] = count.argmin()
        return Balance(group, sending=Sending(2, 4) if len(self.moved) % 2 else None)

    def observe(self, outcome: Outcome) -> None:
        if isinstance(outcome, Relocated) and isinstance(outcome.decision, Balance):
            self.moved.append(outcome.decision)


def to_the_end(patch: pytest.MonkeyPatch) -> None:
    """Every move that has begun has its second stage, also one that empties no row bucket."""

    def second(self: TwoStages, split: Split) -> Balance | None:
        del split
        if self._begun is None:
            return None
        first, pages = self._begun
        return replace(first.balance, group=pages.groups(), sending=None)

    patch.setattr(TwoStages, "second", second)
