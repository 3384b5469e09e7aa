"""Decides whether drafts pay: compares the seconds per generated token with and without them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pat_jax.planning.drafts import Acceptance
from pat_jax.planning.memory import MemoryModel
from pat_jax.planning.planner.costs import LARGE_S, CostTables
from pat_jax.planning.planner.forecast import WEIGHTS, Forecast
from pat_jax.planning.types import DraftLimits, DraftPrediction, Split


@dataclass(frozen=True)
class PoolPressure:
    """A forecast for each layout, given the size of its pools. A moment is reached when all
    sequences have made a number of steps, which takes longer with small pools."""

    steps: np.ndarray  # float[splits, moments], decode steps until the next moment
    running: np.ndarray  # float[splits, moments], sequences that run at once
    rows: np.ndarray  # float[outcomes, splits, moments], sequences running in the fullest replica
    context: np.ndarray  # float[splits, moments], tokens in the cache of the longest sequence
    again: np.ndarray  # float[splits, moments], sequences recomputed in each step

    @classmethod
    def of(
        cls, forecast: Forecast, splits: Sequence[Split], memory: MemoryModel | None
    ) -> "PoolPressure":
        """Returns `forecast` for the pools of `memory`; if None, they hold every sequence."""
        pressure = np.ones(forecast.fullest.shape[1:])
        if memory is not None:
            pressure = _pressure(forecast, splits, memory)
        steps = pressure * forecast.steps
        even = forecast.running / _dp(splits)
        rows = even / pressure + (forecast.fullest - even) / np.sqrt(pressure)
        # The first to begin runs at every step, so the longest are ahead of the average.
        ahead = np.cumsum(steps - forecast.steps, axis=1) - (steps - forecast.steps)
        longest = forecast.context[forecast.any_running > 0.5].max()
        context = np.maximum(np.minimum(forecast.context + ahead, longest), forecast.context)
        # As far as pools overflow, each new token takes the place of one to be recomputed.
        is_full = np.maximum(0.0, 1 - 1 / pressure)
        running = forecast.running / pressure
        again = is_full * running / np.maximum(forecast.mean_context, 1)
        return cls(steps, running, np.maximum(rows, 1), context, again)


def _pressure(forecast: Forecast, splits: Sequence[Split], memory: MemoryModel) -> np.ndarray:
    """Returns the steps that it takes until each running sequence has made one, float[splits,
    moments]. If sequences need more than the pools, some wait while others run. The tokens that
    they hold, summed over all steps, are the same no matter who waits: if they need k times the
    pools, there are k times the steps, with fewer rows each. The result is below one if others wait
    and will find room because each sequence holds less than now."""
    pools = np.array([memory.page_size * (memory.pages[split] - 1) for split in splits])
    each = forecast.mean_context + memory.page_size / 2  # the last page is half empty
    # On average half a sequence's pages stay free: too few for the next one.
    room = np.maximum(pools[:, None] - each / 2, each)
    pressure = forecast.running * each / (_dp(splits) * room)
    least = np.where(forecast.is_pressed, np.minimum(1.0, each / each[0]), 1.0)
    return np.maximum(least, pressure)


def _dp(splits: Sequence[Split]) -> np.ndarray:
    return np.array([split.dp for split in splits])[:, None]


LEAST_GAIN = 0.02  # of a token's time: less is noise, and no reason to draft
# A trial burst has drafts that are predicted not to pay, to learn whether that still holds. It may
# lose this share of the time since the last burst with drafts.
TRIAL_SHARE = 0.005
TRIAL_STEPS = 32  # decode steps of a trial burst
OCCUPANCIES = np.array([1.0, 0.7, 0.5, 0.3, 0.1])  # priced shares of a bucket's rows that run


@dataclass(frozen=True)
class Drafting:
    """The choice of drafts for the next burst, in each layout."""

    # int[split], the number of draft tokens with which a token costs least; 0: no drafts
    best: np.ndarray
    # int[split], the smallest number of draft tokens with a program for these rows; 0: none
    least: np.ndarray
    trial_s: np.ndarray  # float[split], seconds that a burst with `least` is predicted to lose
    plain_s: np.ndarray  # float[split], seconds of a step without drafts
    # By number of draft tokens: float[split] each, seconds of a step and predicted tokens of a row
    # in it.
    steps: Mapping[int, tuple[np.ndarray, np.ndarray]]

    def predicted(self, split: int, num_draft_tokens: int, times: float) -> DraftPrediction:
        """Returns the prediction for layout `split`, if steps take `times` their priced seconds."""
        step_s, tokens = (float(x[split]) for x in self.steps[num_draft_tokens])
        return DraftPrediction(tokens, times * step_s, times * float(self.plain_s[split]))

    def num_draft_tokens(self, split: int, undrafted_s: float) -> int:
        """Returns the number of draft tokens of the next burst, 0 for none. `undrafted_s`: decoding
        seconds since a burst had drafts."""
        best, least = int(self.best[split]), int(self.least[split])
        if best or not least:
            return best
        return least if self.trial_s[split] < TRIAL_SHARE * undrafted_s else 0


def cheapest_steps(
    tables: CostTables,
    pressure: PoolPressure,
    forecast: Forecast,
    acceptance: Acceptance | None,
    limits: DraftLimits,
) -> tuple[np.ndarray, Drafting]:
    """Returns the expected seconds per token of a running sequence with the cheapest drafts at each
    moment, float[split, moments]. Also returns the choice of drafts for the next burst.

    Args:
      acceptance: how many draft tokens are accepted; None: there are no drafts.
      limits: most tokens of a draft, and of a draft model's cache.
    """

    def priced(one: CostTables) -> np.ndarray:
        mean = forecast.mean_context
        steps = one.steps(pressure.rows, pressure.context, mean, pressure.running)
        return np.tensordot(WEIGHTS, steps, axes=1)

    plain = best = priced(tables)
    choice, least = np.zeros((2, len(plain)), np.int64)
    trial_s = np.zeros(len(plain))
    known: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    if acceptance is None:
        return best, Drafting(choice, least, trial_s, plain[:, 0], known)
    for num_draft_tokens, verifying in tables.verifying:
        may_draft = _may_draft(tables, verifying, pressure, forecast, limits)
        most = num_draft_tokens if acceptance.is_generated else limits.tokens
        tokens = _tokens(acceptance, num_draft_tokens, most, verifying.rows, pressure, tables)
        steps = np.where(may_draft, priced(verifying), LARGE_S)
        known[num_draft_tokens] = steps[:, 0], tokens[:, 0]
        is_better = steps / tokens < np.minimum(best, (1 - LEAST_GAIN) * plain)
        choice = np.where(is_better[:, 0], num_draft_tokens, choice)
        best = np.where(is_better, steps / tokens, best)
        is_least = may_draft[:, 0] & (least == 0)
        least = np.where(is_least, num_draft_tokens, least)
        trial_s[is_least] = TRIAL_STEPS * np.maximum(steps - tokens * plain, 0.0)[is_least, 0]
    return best, Drafting(choice, least, trial_s, plain[:, 0], known)


def _may_draft(
    tables: CostTables,
    verifying: CostTables,
    pressure: PoolPressure,
    forecast: Forecast,
    limits: DraftLimits,
) -> np.ndarray:
    """Returns whether drafts have a program and room in a model's cache, bool[split, moments]."""
    rows = pressure.rows.max(axis=0)
    is_cached = (rows <= 1) | (rows * forecast.mean_context <= limits.cached)
    # Few rows have no programs for small numbers, many rows none for large ones: see `Drafts.of`.
    bucket = np.append(tables.rows, 0)[np.searchsorted(tables.rows, rows)]
    return is_cached & np.isin(bucket, verifying.rows)


def _tokens(
    acceptance: Acceptance,
    num_draft_tokens: int,
    draft: int,
    rows: np.ndarray,
    pressure: PoolPressure,
    tables: CostTables,
) -> np.ndarray:
    """Returns the predicted tokens of a row in a step, float[split, moments]. The fewer of a
    bucket's rows are running, the more room for draft tokens each of them has.

    Args:
      rows: int[rows], row buckets with a program for this number of draft tokens.
    """
    place = np.minimum(np.searchsorted(rows, pressure.rows[0]), len(rows) - 1)
    tokens_of = _of_buckets(acceptance, num_draft_tokens, draft, rows)
    dp = np.array([split.dp for split in tables.splits])[:, None]
    filled = np.clip(pressure.running / dp / rows[place], OCCUPANCIES[-1], OCCUPANCIES[0])
    # Linear between two occupancies.
    part = np.clip(np.searchsorted(-OCCUPANCIES, -filled), 1, len(OCCUPANCIES) - 1)
    share = (OCCUPANCIES[part - 1] - filled) / (OCCUPANCIES[part - 1] - OCCUPANCIES[part])
    return (1 - share) * tokens_of[place, part - 1] + share * tokens_of[place, part]


def _of_buckets(one: Acceptance, num_draft_tokens: int, draft: int, rows: np.ndarray) -> np.ndarray:
    """Returns the tokens of a row in a step, float[rows, OCCUPANCIES], by bucket and by the share
    of its rows that are running. Cached, because most plans ask for the same."""
    key = num_draft_tokens, draft, rows.tobytes()
    if key not in one.remembered:
        running = np.maximum(1.0, OCCUPANCIES * rows[:, None])
        room = rows[:, None] * (1 + num_draft_tokens) / running - 1
        one.remembered[key] = np.asarray(one.tokens(room, draft, running))
    return one.remembered[key]
