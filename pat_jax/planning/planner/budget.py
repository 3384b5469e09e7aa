"""Limits what wrong predictions may cost a rollout, by what its decisions have cost so far.

Two rules do this. Both look back at what has happened; only the plan itself looks ahead.

    budget   A switch is allowed if the rollout, were it to end right after it, would be at most
             `SHARE` of its predicted time behind the best static layout. Beyond that, or once
             the rollout has returned to an earlier layout, a switch needs a predicted saving of one
             and a half times its cost, against the same path without it. Layouts not seen yet then
             get no benefit of the doubt.
    rent     If another layout was faster for so long that it would have paid for a switch, it is
             time to switch: break-even, as between renting and buying skis (Karlin et al. 1988:
             never more than twice what the oracle would have spent). If the plan predicts a loss,
             the rent must exceed that as well, up to `MOST_RENT` times the switch: the better the
             plan, the less harm the rule may do (Purohit et al. 2018).

Each switch past the budget, and each return to a layout, triples what the next switch must save or
must have paid. So a plan that switches to and fro on wrong predictions comes to rest.
"""

from dataclasses import dataclass, field

import numpy as np

SHARE = 0.02  # of the rollout's predicted time
MULTIPLE = 0.5  # of its cost that a switch past the budget has to save, beside that cost
MOST_RENT = 3.0  # times its cost: this rent is enough for a switch, whatever the plan predicts
DOUBT = 3.0  # times as much is required after each switch past the budget or back
FASTER = 0.02  # of a step: less is noise, and counts as no faster


@dataclass
class RegretBudget:
    """Sums the seconds that a rollout has taken, and those that it would have taken in each static
    layout, float[layouts]. Bursts count as profiled, uncorrected."""

    prefill_s: np.ndarray  # of all prompts in each layout
    start: int
    switches_s: float = 0.0  # that switches and moves between replicas took
    doubt: float = 1.0  # times that a switch must pay for itself
    rent_s: np.ndarray = field(init=False)  # corrected; lost lately by not being in each layout
    _been: set[int] = field(init=False)  # layouts that it has been in
    _ran: np.ndarray = field(init=False)  # by the layout in which bursts ran
    _stayed: np.ndarray = field(init=False)  # if everything had run in each layout
    # Seconds of a step at the last plan, and the steps done then.
    _expected: tuple[np.ndarray, float] | None = field(default=None, init=False)

    def __post_init__(self):
        self._been = {self.start}
        self.rent_s, self._ran, self._stayed = (np.zeros_like(self.prefill_s) for _ in range(3))

    def expect(self, here: int, step_s: np.ndarray, step: float, correction: np.ndarray) -> None:
        """Books the bursts since the last plan, in layout `here`; from now on steps take `step_s`.

        Args:
          step: decode steps of the rollout so far.
          correction: measured over profiled step time, float[layouts].
        """
        if self._expected is not None:
            before_s, before = self._expected
            seconds = max(0, step - before) * before_s
            self._ran[here] += seconds[here]
            self._stayed += seconds
            lost = (seconds * correction)[here] - seconds * correction
            self.rent_s = np.maximum(self.rent_s + lost, 0.0)
        self._expected = step_s, step

    def switch(
        self, there: int, seconds: float, remaining_s: float, correction: np.ndarray
    ) -> None:
        """Books a switch to layout `there`; `remaining_s`: predicted seconds after it."""
        if not self.affords(seconds, remaining_s, correction) or there in self._been:
            self.doubt *= DOUBT
        self._been.add(there)
        self.switches_s += seconds
        self.rent_s[:] = 0.0

    def balance(self, seconds: float, step_s: np.ndarray) -> None:
        """Books a move between replicas of a layout; from now on steps take `step_s`."""
        assert self._expected is not None, "planned"
        self.switches_s += seconds
        self._expected = step_s, self._expected[1]

    def spent_s(self, correction: np.ndarray) -> float:
        return float(self.prefill_s[self.start] + self._ran @ correction) + self.switches_s

    def behind_s(self, correction: np.ndarray) -> float:
        """Seconds behind the best static layout if the rollout ended now; negative if ahead."""
        static_s = self.prefill_s + self._stayed * correction
        return self.spent_s(correction) - float(static_s.min())

    def affords(self, cost_s: float, remaining_s: float, correction: np.ndarray) -> bool:
        """Whether the rollout stays within the budget if a switch costs `cost_s`. Always False once
        `doubt` is above 1."""
        predicted_s = self.spent_s(correction) + remaining_s
        return self.doubt == 1 and self.behind_s(correction) + cost_s <= SHARE * predicted_s

    def must_save(self, cost_s: float) -> float:
        """Seconds that a switch past the budget must be predicted to save, beside its cost."""
        return MULTIPLE * self.doubt * cost_s

    def due(
        self, here: int, step_s: np.ndarray, cost_s: np.ndarray, loss_s: np.ndarray
    ) -> int | None:
        """Returns the faster layout to switch to because its absence has cost more than the switch
        would; None if there is none.

        Args:
          step_s: float[layouts], one decode step now.
          cost_s: float[layouts], a switch there.
          loss_s: float[layouts], predicted loss of going there, the cost of the switch included.
        """
        price_s = np.clip(loss_s, cost_s, MOST_RENT * cost_s)
        is_faster = step_s < (1 - FASTER) * step_s[here]
        profit = np.where(is_faster, self.rent_s - self.doubt * price_s, -1.0)
        there = int(profit.argmax())
        return there if profit[there] > 0 else None
