"""Limits what wrong predictions may cost a rollout, by what its decisions have cost so far.

A switch is allowed if the rollout, were it to end right after it, would be at most `SHARE` of its
predicted time behind the best static layout. Beyond that, a switch needs a predicted saving of one
and a half times its cost, over the same path without it. Layouts that have not run yet
then get no benefit of the doubt.
"""

from dataclasses import dataclass, field

import numpy as np

SHARE = 0.02  # share of the rollout's predicted time
MULTIPLE = 0.5  # a switch past the budget has to save its cost, and this share of it again


@dataclass
class RegretBudget:
    """Sums the seconds that a rollout has taken, and those that it would have taken in each static
    layout, float[layouts]. Bursts count by profiled seconds, without the correction of a run."""

    prefill_s: np.ndarray  # float[layouts], seconds to prefill all prompts in each layout
    start: int  # index of the layout in which the rollout began
    switches_s: float = 0.0  # seconds that switches and moves between replicas took
    _ran: np.ndarray = field(init=False)  # seconds of the bursts that ran in each layout
    _stayed: np.ndarray = field(init=False)  # seconds of all bursts, had they run in each layout
    # Seconds of a step at the last plan, and the steps done then.
    _expected: tuple[np.ndarray, float] | None = field(default=None, init=False)

    def __post_init__(self):
        self._ran = np.zeros_like(self.prefill_s)
        self._stayed = np.zeros_like(self.prefill_s)

    def expect(self, here: int, step_s: np.ndarray, step: float) -> None:
        """Books the bursts since the last plan: they ran in layout `here` up to decode step
        `step` of the rollout. From now on a step takes `step_s`, float[layouts]."""
        if self._expected is not None:
            before_s, before = self._expected
            seconds = max(0, step - before) * before_s
            self._ran[here] += seconds[here]
            self._stayed += seconds
        self._expected = step_s, step

    def switch(self, seconds: float) -> None:
        """Books the seconds of a switch."""
        self.switches_s += seconds

    def balance(self, seconds: float, step_s: np.ndarray) -> None:
        """Books a move between replicas of a layout. From now on a step takes `step_s`."""
        assert self._expected is not None, "planned"
        self.switches_s += seconds
        self._expected = step_s, self._expected[1]

    def spent_s(self, correction: np.ndarray) -> float:
        return float(self.prefill_s[self.start] + self._ran @ correction) + self.switches_s

    def behind_s(self, correction: np.ndarray) -> float:
        """Returns the seconds that the rollout would be behind the best static layout if it ended
        now. They are negative if it is ahead."""
        static_s = self.prefill_s + self._stayed * correction
        return self.spent_s(correction) - float(static_s.min())

    def affords(self, cost_s: float, remaining_s: float, correction: np.ndarray) -> bool:
        """Returns whether the rollout stays within the budget if a switch costs `cost_s` and
        `remaining_s` are predicted to its end. `correction`: measured / profiled step time,
        float[layouts]."""
        predicted_s = self.spent_s(correction) + remaining_s
        return self.behind_s(correction) + cost_s <= SHARE * predicted_s
