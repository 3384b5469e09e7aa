"""Whether drafts pay: a step that verifies some, priced by what it is expected to say."""

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

    best: np.ndarray  # int[split], the budget with which a token costs least; 0: no drafts
    least: int  # the smallest budget that there is; 0: there is none
    trial_s: np.ndarray  # float[split], what a burst with it is expected to lose

    def budget(self, split: int, undrafted_s: float) -> int:
        """
        Args:
          undrafted_s: seconds of decoding since a burst had drafts.
        """
        best = int(self.best[split])
        if best or not self.least:
            return best
        return self.least if self.trial_s[split] < TRIAL_SHARE * undrafted_s else 0


def cheapest_steps(
    tables: CostTables,
    turns: Turns,
    mean_context: np.ndarray,
    acceptance: Acceptance | None,
    draft: int,
) -> tuple[np.ndarray, Drafting]:
    """Expected seconds in which each live sequence goes on by a token, float[split, moments], with the
    drafts that are cheapest at each moment.

    Args:
      mean_context: float[moments], tokens in the cache of a live sequence.
      acceptance: what drafts are worth; None: there are none.
      draft: most tokens of one.
    """

    def priced(one: CostTables) -> np.ndarray:
        return np.tensordot(WEIGHTS, one.steps(turns.rows, turns.context, mean_context), axes=1)

    plain = best = priced(tables)
    choice, trial_s = np.zeros(len(plain), np.int64), np.zeros(len(plain))
    if acceptance is None or not tables.verifying:
        return best, Drafting(choice, 0, trial_s)
    least, most_rows = tables.verifying[0][0], turns.rows.max(axis=0)
    for budget, verifying in tables.verifying:
        rows = verifying.rows
        has_program = most_rows <= rows[-1]
        # Of each bucket that a group may run in when all its rows are live.
        said = np.array([acceptance.tokens(budget, draft, n) for n in rows])
        tokens = said[np.minimum(np.searchsorted(rows, turns.rows[0]), len(rows) - 1)]
        steps = np.where(has_program, priced(verifying), LARGE_S)
        is_better = steps / tokens < np.minimum(best, (1 - LEAST_GAIN) * plain)
        choice = np.where(is_better[:, 0], budget, choice)
        best = np.where(is_better, steps / tokens, best)
        if budget == least:
            trial_s = TRIAL_STEPS * np.maximum(steps - tokens * plain, 0.0)[:, 0]
    return best, Drafting(choice, least, trial_s)
