"""Ends a run after too many skipped optimizer steps in a row: their gradients are not finite."""

from collections.abc import Callable, Sequence

from pat_jax.common.errors import UserError

# Optimizer steps without a finite gradient, or rollouts in which no response has a reward; one more in
# a row ends a run.
MOST_IN_A_ROW = 8
_POLICY = "train"


class NonFiniteSteps:
    """Counts the skipped steps of one trained role. More than `most` in a row end the run. The
    policy has the role `train`."""

    def __init__(self, most: int, notify: Callable[[str], None], role: str = _POLICY):
        is_policy = role == _POLICY
        self._whose = "" if is_policy else f" of the {role}"
        self._rate = f"--{'optimizer' if is_policy else role}.learning_rate"
        self._most = most
        self._notify = notify
        self._in_a_row = 0

    def note(self, step: int, applied: Sequence[bool]) -> None:
        """Counts the optimizer steps of `step` (from 1) that were not applied. Raises UserError if
        too many in a row were skipped."""
        longest = 0
        for is_applied in applied:
            self._in_a_row = 0 if is_applied else self._in_a_row + 1
            longest = max(longest, self._in_a_row)
        if all(applied):
            return
        what = f"step {step}: {applied.count(False)} of {len(applied)} optimizer steps{self._whose} left out"
        self._notify(f"{what}, their gradient not finite (NaN or infinite)")
        if longest > self._most:
            raise UserError(
                f"{longest} optimizer steps{self._whose} in a row had a gradient that is not finite (NaN or "
                f"infinite), the last in step {step}: expected at most {self._most}; "
                f"lower {self._rate}, or resume from an earlier checkpoint."
            )
