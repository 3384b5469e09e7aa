"""Warns once if a run learns nothing, or if many responses are cut, and suggests what to look at.

Knows metrics. Does not know how they are measured.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

STEPS = 10  # that many equal steps in a row are no accident
GRADIENT = "train/grad_norm"
REWARD = "reward/mean"
LENGTH = "rollout/length_mean"
SPREAD = "reward/std"
CUT, MANY = "rollout/truncated", 0.2  # share of cut responses above which to warn
_LOOK = "look at the responses and their rewards (run.html, --log_completions)"

log = logging.getLogger(__name__)


@dataclass
class Unmoved:
    """Watches the metrics of a run. `longest` is the limit of a response, in tokens."""

    notify: Callable[[str], None]
    longest: int
    _has_warned: bool = False
    _rows: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=STEPS))

    def note(self, step: int, metrics: Mapping[str, Any]) -> None:
        if not self._rows:
            self._tell(step, advice_on_length(metrics, self.longest))
        self._rows.append(metrics)
        if not self._has_warned and (sentence := advice(list(self._rows))):
            self._has_warned = True
            self._tell(step, sentence)

    def _tell(self, step: int, sentence: str) -> None:
        if sentence:
            self.notify(f"step {step}: {sentence}")
            log.warning("step %d: %s", step, sentence)


def advice_on_length(row: Mapping[str, Any], longest: int) -> str:
    """Returns a sentence on what to do if many responses of a step were cut, else ""."""
    if (share := _number(row, CUT)) <= MANY:
        return ""
    return (
        f"{100 * share:.0f} % of the responses were cut at {longest:,} tokens "
        "(--rollout.max_completion_length); the answer often comes last: raise the limit, or ask "
        "for shorter answers"
    )


def advice(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a sentence on what to look at if the metrics of the last `STEPS` steps did not move.
    Returns "" if they did, or if nothing is trained. `rows` are the metrics of steps; NaN or None
    stands for values that are not finite."""
    last = rows[-STEPS:]
    if len(last) < STEPS or not all(GRADIENT in row for row in last):
        return ""
    if all(row.get(REWARD) == row.get(SPREAD) == 0 for row in last):
        return f"nothing was rewarded in the last {STEPS} steps: nothing is learned; {_LOOK}"
    if not any(_number(row, GRADIENT) for row in last):
        return (
            f"the gradient of the last {STEPS} steps was 0 or none: nothing is learned; {_LOOK} "
            "and at reward/groups_without_signal: responses to one prompt that all earn the same "
            "teach nothing"
        )
    if _is_constant(last, REWARD) and _is_constant(last, LENGTH):
        return (
            f"reward ({last[-1][REWARD]:.3g}) and mean response length ({last[-1][LENGTH]:.4g}) "
            f"were the same in each of the last {STEPS} steps; {_LOOK}, at "
            "--rollout.max_completion_length if all are cut off, and at --optimizer.learning_rate"
        )
    return ""


def _number(row: Mapping[str, Any], name: str) -> float:
    """Returns the metric's value, or 0 if it is missing or not finite."""
    value = row.get(name)
    return value if value is not None and math.isfinite(value) else 0.0


def _is_constant(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    values = [row.get(name) for row in rows]
    known = [value for value in values if value is not None and math.isfinite(value)]
    return len(known) == len(rows) and max(known) - min(known) <= 1e-9
