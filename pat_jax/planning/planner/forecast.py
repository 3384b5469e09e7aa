"""What a length model expects of the running sequences at a few future moments."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.refill import horizon, refill
from pat_jax.planning.types import Load, Split

MAX_CLASSES = 64  # kinds of sequences told apart; bounds the work at any number of sequences
# Outcomes looked at, in standard deviations, and their weights (Gauss-Hermite, three points): a
# step costs what its row bucket costs, so its expectation is not the cost of the expected rows.
OUTCOMES = np.sqrt(3.0) * np.array([0.0, -1.0, 1.0])
WEIGHTS = np.array([2 / 3, 1 / 6, 1 / 6])


@dataclass(frozen=True)
class SequenceClasses:
    """The sequences of a load, those with like prospects counted together."""

    generated: np.ndarray  # int[classes], tokens sampled so far
    budget: np.ndarray  # int[classes], tokens that may still be sampled
    context: np.ndarray  # int[classes], tokens in the cache of the longest member
    mean_context: np.ndarray  # float[classes], and of all
    count: np.ndarray  # [groups, classes], members by data-parallel group

    @classmethod
    def of(cls, load: Load, kind: np.ndarray, most: int) -> "SequenceClasses":
        """
        Args:
          kind: int[live], the same for sequences of one class.
          most: the most classes.
        """
        # In few bits, which NumPy sorts by radix: several times as fast.
        order = np.argsort(kind.astype(np.min_scalar_type(kind.max())), kind="stable")
        ordered = kind[order]
        starts = np.concatenate([[0], np.flatnonzero(ordered[1:] != ordered[:-1]) + 1])
        if len(starts) > most:
            # Kinds that are neighbours share a class; its middle member speaks for it.
            starts = np.arange(most) * load.live // most
        sizes = np.append(starts[1:], load.live) - starts
        first, classes = order[starts + sizes // 2], len(starts)
        label = np.repeat(np.arange(classes), sizes)
        groups = int(load.group.max()) + 1
        count = np.bincount(load.group[order] * classes + label, minlength=groups * classes)
        context = load.context[order]
        return cls(
            load.generated[first],
            load.budget[first],
            np.maximum.reduceat(context, starts),
            np.add.reduceat(context, starts) / sizes,
            count.reshape(groups, classes),
        )


@dataclass(frozen=True)
class Forecast:
    """What is expected at each of a few future moments."""

    steps: np.ndarray  # int[moments], decode steps until the next moment
    any_live: np.ndarray  # float[moments], probability that the rollout is still going
    live: np.ndarray  # float[moments], expected unfinished sequences
    context: np.ndarray  # int[moments], tokens in the cache of the longest sequence
    mean_context: np.ndarray  # float[moments], tokens in the cache of a sequence that is live then
    fullest: np.ndarray  # float[outcomes, splits, moments], live sequences of the fullest group
    takes_turns: np.ndarray  # bool[moments], sequences wait for pages that others give back
    prompts: float = 1.0  # of a live sequence: samples of a prompt share its prefill

    @classmethod
    def of(
        cls,
        load: Load,
        lengths: LengthModel,
        splits: Sequence[Split],
        current: Split | None,
        num_moments: int,
        *,
        rows_vary: bool = False,
        is_evened: bool = False,
    ) -> "Forecast":
        """
        Args:
          current: the split that `load.group` counts in; None where nothing runs yet.
          rows_vary: sequences wait for pages, not for rows: how many run at once changes with how
            much those hold that do.
          is_evened: sequences move between groups, so that no group stays fuller than others.
        """
        edges = moment_edges(horizon(load, lengths), num_moments)
        moments = edges[:-1]
        seen = _Prospects.of(load, lengths, moments, current)
        fullest = [
            seen.evened(split.dp) if is_evened else seen.fullest(split.dp, current, rows_vary)
            for split in splits
        ]
        return cls(
            edges[1:] - moments,
            seen.any_live,
            np.maximum(seen.total @ seen.survive, 1),
            seen.longest(load, moments),
            seen.mean_context + moments,
            np.maximum(np.stack(fullest, axis=1), 1),
            seen.is_queued & rows_vary,
            1.0 if load.prompt is None else len(np.unique(load.prompt)) / load.live,
        )


@dataclass(frozen=True)
class _Prospects:
    """Classes of sequences: first those that run, then those that wait and will begin at a moment."""

    count: np.ndarray  # float[groups, classes], members by data-parallel group
    context: (
        np.ndarray
    )  # int[classes], tokens in the cache of the longest member, had all begun now
    mean: np.ndarray  # float[classes], and of all
    survive: np.ndarray  # float[classes, moments], P(live)
    num_running: int  # classes of those that run
    is_queued: np.ndarray  # bool[moments], sequences wait

    @classmethod
    def of(
        cls, load: Load, lengths: LengthModel, moments: np.ndarray, current: Split | None
    ) -> "_Prospects":
        classes, survive = _survival(load, lengths, moments)
        count, context, mean = classes.count.astype(float), classes.context, classes.mean_context
        if not load.waiting:
            none_waits = np.zeros(len(moments), bool)
            return cls(count, context, mean, survive, len(survive), none_waits)
        queue = refill(load, lengths, count.sum(axis=0) @ survive, moments)
        groups = current.dp if current else 1
        count = np.pad(count, ((0, groups - len(count)), (0, 0)))
        return cls(
            np.hstack([count, np.tile(queue.count / groups, (groups, 1))]),
            np.concatenate([context, queue.context]),
            np.concatenate([mean, queue.context]),
            np.vstack([survive, queue.survive]),
            len(survive),
            queue.is_queued,
        )

    @cached_property
    def total(self) -> np.ndarray:
        """float[classes], members in all groups."""
        return self.count.sum(axis=0)

    @cached_property
    def variance(self) -> np.ndarray:
        """float[classes, moments], of one member; a certainty may be rounded to more than 1."""
        return np.maximum(self.survive * (1 - self.survive), 0.0)

    @property
    def any_live(self) -> np.ndarray:
        return 1 - np.exp(self.total @ np.log1p(-np.minimum(self.survive, 1 - 1e-15)))

    @property
    def mean_context(self) -> np.ndarray:
        """float[moments], of those that are live then, as it is now."""
        weight = self.total[:, None] * self.survive
        # Where all who are known will have ended, whoever is live then is like any of them.
        weight = np.where(weight.sum(axis=0) > 0, weight, self.total[:, None])
        return self.mean @ weight / weight.sum(axis=0)

    def longest(self, load: Load, moments: np.ndarray) -> np.ndarray:
        """The longest context that is still expected to be live, or the likeliest to be, int[moments]."""
        is_live = (self.survive > 0.5 / load.live) | (self.survive == self.survive.max(axis=0))
        context = np.where(is_live, self.context[:, None], 0).max(axis=0) + moments
        return np.minimum(context, (load.context + load.budget).max())

    def fullest(self, dp: int, current: Split | None, rows_vary: bool) -> np.ndarray:
        """Live sequences of the fullest of `dp` groups, float[outcomes, moments]."""
        members = _in_groups(self.count, dp, current)
        now = members[:, : self.num_running]
        most = now.sum(axis=1).max()  # none is ever fuller than now
        expected = np.minimum(_fullest(members, self.survive, self.variance, dp), np.ceil(most))
        queued = _varied(now, self.survive[: self.num_running], dp) if rows_vary else most
        return np.where(self.is_queued, queued, expected)

    def evened(self, dp: int) -> np.ndarray:
        """The same where as many live in each group as can be, but for what does not divide."""
        total, spread = self.total, np.sqrt(self.total @ self.variance)
        expected = (total @ self.survive + (dp - 1) / 2 + OUTCOMES[:, None] * spread) / dp
        return np.minimum(expected, np.ceil(total.sum() / dp))


def _survival(
    load: Load, lengths: LengthModel, moments: np.ndarray
) -> tuple[SequenceClasses, np.ndarray]:
    """Classes of sequences, and P(live at each moment), float64[classes, moments]."""
    # Nothing lives past its budget, and between two moments it is all one where that ends.
    num_alive = np.searchsorted(moments, load.budget)
    kind = load.generated.astype(np.int64) * (len(moments) + 1) + num_alive
    classes = SequenceClasses.of(load, kind, MAX_CLASSES)
    return classes, lengths.survival(classes.generated, classes.budget, moments)


def moment_edges(horizon: int, num_moments: int) -> np.ndarray:
    """Decode steps from now, from 0 to `horizon`: finer near the present, where decisions fall."""
    grid = np.linspace(0, 1, num_moments + 1) ** 2
    return np.unique(np.round(horizon * grid).astype(int))


def _in_groups(count: np.ndarray, dp: int, current: Split | None) -> np.ndarray:
    """Members of each class in `dp` groups, or in one that is like each of them."""
    if current is not None and current.dp >= dp:
        return _merged(count, current.dp, dp)  # groups that exist, or merge
    return count.sum(axis=0, keepdims=True) / dp  # dealt out anew


def _fullest(count: np.ndarray, survive: np.ndarray, variance: np.ndarray, dp: int) -> np.ndarray:
    """Live sequences of the fullest of `dp` groups, float[outcomes, moments]."""
    spread = np.sqrt(count @ variance)
    expected = (count @ survive + _max_of(dp) * spread).max(axis=0)
    # The fullest of several groups varies less than each of them.
    return expected + OUTCOMES[:, None] * _SPREAD_OF_MAX.get(dp, 0.6) * spread.max(axis=0)


def _varied(count: np.ndarray, survive: np.ndarray, dp: int) -> np.ndarray:
    """Rows of the fullest of `dp` groups while others take the pages of those that end.

    As many on average, each with other contexts: the more of them are new, the less is known.
    """
    most, mean = count.sum(axis=1).max(), count.sum(axis=1).mean()
    # Rounded, it may come to more than all: groups of a third of the sequences do not add up.
    kept = np.minimum(count.sum(axis=0) @ survive / count.sum(), 1.0)
    spread = np.sqrt(mean * (1 - kept))
    expected = mean + (most - mean) * kept + _max_of(dp) * spread
    return expected + OUTCOMES[:, None] * _SPREAD_OF_MAX.get(dp, 0.6) * spread


def _merged(count: np.ndarray, source_dp: int, target_dp: int) -> np.ndarray:
    """Group g joins group g modulo `target_dp`, as a migration merges them."""
    whole = np.zeros((source_dp, count.shape[1]), count.dtype)
    whole[: len(count)] = count
    return whole.reshape(-1, target_dp, count.shape[1]).sum(axis=0)


_SPREAD_OF_MAX = {1: 1.0, 2: 0.83, 4: 0.70, 8: 0.61}  # standard deviation of n normals' maximum


def _max_of(n: int) -> float:
    """Expected maximum of n standard normal numbers, roughly (0 for one)."""
    return 0.0 if n == 1 else float(np.sqrt(2 * np.log(n)) * 0.7)
