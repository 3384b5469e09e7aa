"""What a rollout's decisions have cost so far, and so what they may still cost.

Two rules bound what wrong predictions may cost. Both look back, on what happened; only the plan
itself looks ahead.

    budget   A switch may be tried as long as the rollout, ended right after it, would be no more
             than `SHARE` of its predicted time behind the best static layout. Past that, or once it
             has come back to a layout, it must promise its cost and a half over the same path
             without it, layouts not seen yet getting no benefit of the doubt.
    rent     Where another layout was faster for so long that a switch there would have been paid
             for, it is time to go: break-even, as between renting and buying skis (Karlin et al.
             1988: never more than twice what the oracle would have spent). Where the plan predicts
             a loss, the rent must have outgrown that, too, up to `MOST_RENT` times the switch: the
             better the plan, the less the rule may spoil (Purohit et al. 2018).

Each switch past the budget, and each back to a layout that was left, triples what the next one must
have paid or promise. So a plan that goes to and fro on wrong beliefs comes to rest.
"""

from dataclasses import dataclass, field

import numpy as np

SHARE = 0.02  # of the rollout's predicted time
MULTIPLE = 0.5  # of its cost that a switch past the budget has to save, beside that cost
MOST_RENT = 3.0  # times its cost: so much rent is due for a switch whatever the plan predicts
DOUBT = 3.0  # times as much is asked after each switch past the budget or back
FASTER = 0.02  # of a step: less is noise, no rent is due for it


@dataclass
class RegretBudget:
    """One rollout's account, float[layouts] seconds; of bursts the profile's, uncorrected."""

    prefill_s: np.ndarray  # of all prompts in each
    start: int
    switches_s: float = 0.0  # what the switches took, and moves between replicas
    doubt: float = 1.0  # times that a switch must pay for itself
    rent_s: np.ndarray = field(init=False)  # corrected; lost of late by not being in each
    _been: set[int] = field(init=False)  # layouts that it has been in
    _ran: np.ndarray = field(init=False)  # by where it ran
    _stayed: np.ndarray = field(init=False)  # had everything run in each
    # Of a step when the last plan was made, and the steps done then.
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
        """`remaining_s`: predicted, from then on."""
        if not self.affords(seconds, remaining_s, correction) or there in self._been:
            self.doubt *= DOUBT
        self._been.add(there)
        self.switches_s += seconds
        self.rent_s[:] = 0.0

    def balance(self, seconds: float, step_s: np.ndarray) -> None:
        """Sequences moved between replicas of a layout: from now on steps take `step_s`."""
        assert self._expected is not None, "planned"
        self.switches_s += seconds
        self._expected = step_s, self._expected[1]

    def spent_s(self, correction: np.ndarray) -> float:
        return float(self.prefill_s[self.start] + self._ran @ correction) + self.switches_s

    def behind_s(self, correction: np.ndarray) -> float:
        """Behind the best static layout, if the rollout ended now; negative: ahead of it."""
        static_s = self.prefill_s + self._stayed * correction
        return self.spent_s(correction) - float(static_s.min())

    def affords(self, cost_s: float, remaining_s: float, correction: np.ndarray) -> bool:
        """Whether a switch stays within the budget, nothing having gone to and fro so far."""
        predicted_s = self.spent_s(correction) + remaining_s
        return self.doubt == 1 and self.behind_s(correction) + cost_s <= SHARE * predicted_s

    def must_save(self, cost_s: float) -> float:
        """Seconds that a switch past the budget has to promise, beside its cost."""
        return MULTIPLE * self.doubt * cost_s

    def due(
        self, here: int, step_s: np.ndarray, cost_s: np.ndarray, loss_s: np.ndarray
    ) -> int | None:
        """The layout whose rent has paid for the switch to it, if it is still the faster one.

        Args:
          step_s: float[layouts], one decode step now.
          cost_s: float[layouts], a switch there.
          loss_s: float[layouts], what the plan says that going there loses, its cost included.
        """
        price_s = np.clip(loss_s, cost_s, MOST_RENT * cost_s)
        is_faster = step_s < (1 - FASTER) * step_s[here]
        profit = np.where(is_faster, self.rent_s - self.doubt * price_s, -1.0)
        there = int(profit.argmax())
        return there if profit[there] > 0 else None
