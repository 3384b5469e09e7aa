"""A rollout whose sequences wait for rows, forecast from a schedule of them: to price orders in which they begin."""

from collections.abc import Callable, Sequence

import numpy as np

from pat_jax.planning.planner.forecast import OUTCOMES, Forecast
from pat_jax.planning.planner.stagger import Queue, Schedule
from pat_jax.planning.types import Split, Stagger

Seconds = Callable[[Schedule], float]


def scheduled_forecast(schedule: Schedule, splits: Sequence[Split], num_moments: int) -> Forecast:
    """As if the lengths were known."""
    edges = np.unique(np.linspace(0, np.ceil(schedule.last), num_moments + 1).astype(int))
    live, mean, longest = schedule.at(edges)
    dp = np.array([split.dp for split in splits])
    fullest = np.ceil(np.maximum(live / dp[:, None], 1))
    return Forecast(
        steps=np.diff(edges),
        any_live=np.ones(len(live)),
        live=np.maximum(live, 1),
        context=np.ceil(longest).astype(int),
        mean_context=mean,
        fullest=np.tile(fullest, (len(OUTCOMES), 1, 1)),
        takes_turns=np.zeros(len(live), bool),
    )


def decided(
    queue: Queue,
    lengths: np.ndarray,
    rows: int,
    right: float,
    seconds: Seconds,
    prefill_s: Seconds,
    *,
    safety: float,
    least: float,
) -> Stagger:
    """
    Args:
      lengths: float[sequences], tokens that responses come to.
      rows: that run at once.
      right: tokens of drafts that are right in a step of a row while all are full.
      seconds: of decoding.
      prefill_s: of prompts whose pages nobody holds.
      safety: so many times a cost counts.
      least: share of the decoding that has to be saved.
    """
    if right <= 0:
        return Stagger(False, reason="nothing is drafted while sequences wait")
    as_asked, later = (
        Schedule.of(queue, order, lengths, rows, right) for order in (queue.order, queue.staggered)
    )
    stay = seconds(as_asked)
    saving, cost = stay - seconds(later), prefill_s(later) - prefill_s(as_asked)
    pays = saving - safety * max(cost, 0.0) >= least * stay
    reason = (
        f"with {later.whole.mean():.1f} whole siblings to draft from when a sequence begins, not "
        f"{as_asked.whole.mean():.1f}: saves {saving:.2f} s of {stay:.2f} s, costs {cost:.2f} s of prefill"
    )
    return Stagger(bool(pays), saving, cost, reason)
