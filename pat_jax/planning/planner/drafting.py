"""Whether drafts pay: a step that verifies one, priced by what it is expected to say."""

from dataclasses import dataclass

import numpy as np

from pat_jax.planning.drafts import Acceptance
from pat_jax.planning.planner.costs import LARGE_S, CostTables
from pat_jax.planning.planner.forecast import WEIGHTS
from pat_jax.planning.planner.turns import Turns

LEAST_GAIN = 0.02  # of a token's time: less is noise, not a reason
# Bursts that try drafts which are not expected to pay, to learn whether that is so still, may lose this
# share of the time since the last one.
TRIAL_SHARE = 0.005
TRIAL_STEPS = 32  # of such a burst


@dataclass(frozen=True)
class Drafting:
    """Drafts of the next burst, in each split."""

    best: np.ndarray  # int[split], tokens of the draft with which a token costs least; 0: none
    shortest: int  # tokens of the shortest draft that there is; 0: there is none
    trial_s: np.ndarray  # float[split], what a burst with it is expected to lose

    def draft(self, split: int, undrafted_s: float) -> int:
        """
        Args:
          undrafted_s: seconds of decoding since a burst had drafts.
        """
        best = int(self.best[split])
        if best or not self.shortest:
            return best
        return self.shortest if self.trial_s[split] < TRIAL_SHARE * undrafted_s else 0


def cheapest_steps(
    tables: CostTables, turns: Turns, mean_context: np.ndarray, acceptance: Acceptance | None
) -> tuple[np.ndarray, Drafting]:
    """Expected seconds in which each live sequence goes on by a token, float[split, moments], with the
    drafts that are cheapest at each moment.

    Args:
      mean_context: float[moments], tokens in the cache of a live sequence.
      acceptance: what drafts are worth; None: there are none.
    """

    def priced(one: CostTables) -> np.ndarray:
        return np.tensordot(WEIGHTS, one.steps(turns.rows, turns.context, mean_context), axes=1)

    plain = best = priced(tables)
    choice, trial_s = np.zeros(len(plain), np.int64), np.zeros(len(plain))
    if acceptance is None or not tables.verifying:
        return best, Drafting(choice, 0, trial_s)
    shortest = tables.verifying[0][0]
    for draft, verifying in tables.verifying:
        has_program = turns.rows.max(axis=0) <= verifying.rows[-1]
        tokens, steps = acceptance.tokens(draft), np.where(has_program, priced(verifying), LARGE_S)
        is_better = steps / tokens < np.minimum(best, (1 - LEAST_GAIN) * plain)
        choice = np.where(is_better[:, 0], draft, choice)
        best = np.where(is_better, steps / tokens, best)
        if draft == shortest:
            trial_s = TRIAL_STEPS * np.maximum(steps - tokens * plain, 0.0)[:, 0]
    return best, Drafting(choice, shortest, trial_s)
