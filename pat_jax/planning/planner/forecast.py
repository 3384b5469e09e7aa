"""Predicts by a length model which sequences run at a few future moments (steps from now)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.refill import horizon, refill
from pat_jax.planning.types import Load, Split

MAX_CLASSES = 64  # bounds the work for any number of sequences
# Three outcomes for the number of running sequences, in standard deviations from the expected
# number, and their weights (Gauss-Hermite). All are priced: a step costs what its row bucket costs,
# so the expected cost is not the cost of the expected number.
OUTCOMES = np.sqrt(3.0) * np.array([0.0, -1.0, 1.0])
WEIGHTS = np.array([2 / 3, 1 / 6, 1 / 6])


@dataclass(frozen=True)
class SequenceClasses:
    """The sequences of a load in classes, by the tokens that each is likely to have left."""

    generated: np.ndarray  # int[classes], tokens sampled so far
    remaining_tokens: np.ndarray  # int[classes], tokens that may still be sampled
    context: np.ndarray  # int[classes], tokens in the cache of the longest member
    mean_context: np.ndarray  # float[classes], mean tokens in the cache of all members
    count: np.ndarray  # [replicas, classes], number of members in each replica

    @classmethod
    def of(cls, load: Load, kind: np.ndarray, most: int) -> "SequenceClasses":
        """Returns at most `most` classes. Sequences of equal `kind`, int[running], are in one
        class."""
        # In few bits, which NumPy sorts by radix: several times as fast.
        order = np.argsort(kind.astype(np.min_scalar_type(kind.max())), kind="stable")
        ordered = kind[order]
        starts = np.concatenate([[0], np.flatnonzero(ordered[1:] != ordered[:-1]) + 1])
        if len(starts) > most:
            # Neighbouring kinds share a class; its middle member represents it.
            starts = np.arange(most) * load.running // most
        sizes = np.append(starts[1:], load.running) - starts
        first = order[starts + sizes // 2]
        classes = len(starts)
        label = np.repeat(np.arange(classes), sizes)
        replicas = int(load.replica.max()) + 1
        count = np.bincount(load.replica[order] * classes + label, minlength=replicas * classes)
        context = load.context[order]
        return cls(
            load.generated[first],
            load.remaining_tokens[first],
            np.maximum.reduceat(context, starts),
            np.add.reduceat(context, starts) / sizes,
            count.reshape(replicas, classes),
        )


@dataclass(frozen=True)
class Forecast:
    """The predicted state of a rollout at each of a few future moments."""

    steps: np.ndarray  # int[moments], decode steps until the next moment
    any_running: np.ndarray  # float[moments], probability that any sequence is still running
    running: np.ndarray  # float[moments], expected unfinished sequences
    context: np.ndarray  # int[moments], tokens in the cache of the longest sequence
    # float[moments], tokens in the cache of a sequence that is running then
    mean_context: np.ndarray
    # float[outcomes, splits, moments], running sequences of the fullest replica
    fullest: np.ndarray
    is_pressed: np.ndarray  # bool[moments], whether sequences wait for pages
    prompts: float = 1.0  # prompts per running sequence: samples of one share its prefill

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
        """Returns the forecast of `load` at up to `num_moments` moments.

        Args:
          current: the layout whose replicas `load.replica` counts; None before anything runs.
          rows_vary: sequences wait for pages, not for rows. So the number that run at once depends
            on how many pages each of them holds.
          is_evened: sequences move between replicas, so that no replica stays fuller than others.
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
            seen.any_running,
            np.maximum(seen.total @ seen.survive, 1),
            seen.longest(load, moments),
            seen.mean_context + moments,
            np.maximum(np.stack(fullest, axis=1), 1),
            seen.is_queued & rows_vary,
            1.0 if load.prompt is None else len(np.unique(load.prompt)) / load.running,
        )


@dataclass(frozen=True)
class _Prospects:
    """Classes of sequences: first those that run, then those that wait and begin later."""

    count: np.ndarray  # float[replicas, classes], members by replica
    # int[classes], tokens in the cache of the longest member, had all begun now
    context: np.ndarray
    mean: np.ndarray  # float[classes], the mean of these tokens over all members
    survive: np.ndarray  # float[classes, moments], P(a member runs)
    num_running: int  # number of the first classes, whose members run now
    is_queued: np.ndarray  # bool[moments], whether sequences wait

    @classmethod
    def of(
        cls, load: Load, lengths: LengthModel, moments: np.ndarray, current: Split | None
    ) -> "_Prospects":
        # Nothing runs past its limit; where that lies between two moments does not matter.
        num_alive = np.searchsorted(moments, load.remaining_tokens)
        kind = load.generated.astype(np.int64) * (len(moments) + 1) + num_alive
        classes = SequenceClasses.of(load, kind, MAX_CLASSES)
        survive = lengths.survival(classes.generated, classes.remaining_tokens, moments)
        count = classes.count.astype(float)
        context = classes.context
        mean = classes.mean_context
        if not load.waiting:
            none_waits = np.zeros(len(moments), bool)
            return cls(count, context, mean, survive, len(survive), none_waits)
        queue = refill(load, lengths, count.sum(axis=0) @ survive, moments)
        replicas = current.dp if current else 1
        count = np.pad(count, ((0, replicas - len(count)), (0, 0)))
        return cls(
            np.hstack([count, np.tile(queue.count / replicas, (replicas, 1))]),
            np.concatenate([context, queue.context]),
            np.concatenate([mean, queue.context]),
            np.vstack([survive, queue.survive]),
            len(survive),
            queue.is_queued,
        )

    @cached_property
    def total(self) -> np.ndarray:
        """Number of members of each class in all replicas, float[classes]."""
        return self.count.sum(axis=0)

    @cached_property
    def variance(self) -> np.ndarray:
        """p (1 - p) with p = `survive`, float[classes, moments]; a rounded p may exceed 1."""
        return np.maximum(self.survive * (1 - self.survive), 0.0)

    @property
    def any_running(self) -> np.ndarray:
        return 1 - np.exp(self.total @ np.log1p(-np.minimum(self.survive, 1 - 1e-15)))

    @property
    def mean_context(self) -> np.ndarray:
        """Present mean context of the sequences that will run at each moment, float[moments]."""
        weight = self.total[:, None] * self.survive
        # Once all known sequences will have ended, a request that runs is assumed to be like any of
        # them.
        weight = np.where(weight.sum(axis=0) > 0, weight, self.total[:, None])
        return self.mean @ weight / weight.sum(axis=0)

    def longest(self, load: Load, moments: np.ndarray) -> np.ndarray:
        """Returns the context of the longest sequence that is likely to run at each moment,
        int[moments]. The class likeliest to run always counts."""
        is_likeliest = self.survive == self.survive.max(axis=0)
        is_running = (self.survive > 0.5 / load.running) | is_likeliest
        context = np.where(is_running, self.context[:, None], 0).max(axis=0) + moments
        return np.minimum(context, (load.context + load.remaining_tokens).max())

    def fullest(self, dp: int, current: Split | None, rows_vary: bool) -> np.ndarray:
        """Returns running sequences of the fullest of `dp` replicas, float[outcomes, moments]."""
        members = self.count.sum(axis=0, keepdims=True) / dp  # dealt out anew
        if current is not None and current.dp >= dp:
            members = _merged(self.count, current.dp, dp)  # replicas that exist, or merge
        now = members[:, : self.num_running]
        most = now.sum(axis=1).max()  # none is ever fuller than now
        expected = np.minimum(_fullest(members, self.survive, self.variance, dp), np.ceil(most))
        queued = _varied(now, self.survive[: self.num_running], dp) if rows_vary else most
        return np.where(self.is_queued, queued, expected)

    def evened(self, dp: int) -> np.ndarray:
        """Returns `fullest`, if sequences are spread over the replicas as evenly as possible."""
        total = self.total
        spread = np.sqrt(self.total @ self.variance)
        expected = (total @ self.survive + (dp - 1) / 2 + OUTCOMES[:, None] * spread) / dp
        return np.minimum(expected, np.ceil(total.sum() / dp))


def moment_edges(horizon: int, num_moments: int) -> np.ndarray:
    """Returns steps from now, 0 to `horizon`: denser near the present, where decisions are."""
    grid = np.linspace(0, 1, num_moments + 1) ** 2
    return np.unique(np.round(horizon * grid).astype(int))


def _fullest(count: np.ndarray, survive: np.ndarray, variance: np.ndarray, dp: int) -> np.ndarray:
    """Returns the running sequences of the fullest of `dp` replicas, float[outcomes, moments]."""
    spread = np.sqrt(count @ variance)
    expected = (count @ survive + _max_of(dp) * spread).max(axis=0)
    # The fullest of several replicas varies less than each of them.
    return expected + OUTCOMES[:, None] * _SPREAD_OF_MAX.get(dp, 0.6) * spread.max(axis=0)


def _varied(count: np.ndarray, survive: np.ndarray, dp: int) -> np.ndarray:
    """Returns the running sequences of the fullest of `dp` replicas while waiting ones replace
    those that end. Their mean number stays, but contexts change: the more sequences are new, the
    less certain it is."""
    most, mean = count.sum(axis=1).max(), count.sum(axis=1).mean()
    # Rounding may give more than 1: replicas of a third of the sequences do not add up exactly.
    kept = np.minimum(count.sum(axis=0) @ survive / count.sum(), 1.0)
    spread = np.sqrt(mean * (1 - kept))
    expected = mean + (most - mean) * kept + _max_of(dp) * spread
    return expected + OUTCOMES[:, None] * _SPREAD_OF_MAX.get(dp, 0.6) * spread


def _merged(count: np.ndarray, source_dp: int, target_dp: int) -> np.ndarray:
    """Returns the counts after replica g joins replica g modulo `target_dp`, as in a migration."""
    whole = np.zeros((source_dp, count.shape[1]), count.dtype)
    whole[: len(count)] = count
    return whole.reshape(-1, target_dp, count.shape[1]).sum(axis=0)


_SPREAD_OF_MAX = {1: 1.0, 2: 0.83, 4: 0.70, 8: 0.61}  # standard deviation of n normals' maximum


def _max_of(n: int) -> float:
    """Returns roughly the expected maximum of n standard normal numbers (0 for one)."""
    return 0.0 if n == 1 else float(np.sqrt(2 * np.log(n)) * 0.7)
