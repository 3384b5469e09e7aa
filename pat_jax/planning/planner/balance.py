"""What it costs to move sequences between the data-parallel groups of a layout, in one stage or in two."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from pat_jax.planning.latency.model import LatencyModel
from pat_jax.planning.latency.switch_costs import SwitchCosts
from pat_jax.planning.types import Load, Plan, Sending, SendLimits, Split


def balance_seconds(latency: LatencyModel, split: Split, load: Load, group: np.ndarray) -> float:
    """Profiled seconds until every sequence of `load` is in its `group`, int[live], at least one of
    them another than now; infinite where no such move was measured.
    """
    rounds = int(rounds_by_distance(latency, split, load, group).sum())
    return rounds * latency.shift_round(split)


def rounds_by_distance(
    latency: LatencyModel, split: Split, load: Load, group: np.ndarray
) -> np.ndarray:
    """Rounds of pages that go equally far, int[distances].

    They go together (`engine/relocation/rounds.py`): of each distance the group that has most to send sets
    the number of rounds.
    """
    tokens = _most(split, load, group, load.context)
    return np.ceil(tokens / latency.round_tokens).astype(int)


def _most(split: Split, load: Load, group: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Of `counts`, int[live], what the group that has most sends to each distance, int[distances]."""
    moved = np.flatnonzero(group != load.group)
    sums = np.zeros((split.dp, split.dp))
    distance = (group - load.group)[moved] % split.dp
    np.add.at(sums, (distance, load.group[moved]), counts[moved])
    return sums.max(axis=1)


@dataclass(frozen=True)
class PricedMove:
    """A move in as many stages as are cheapest."""

    words: str
    idle_s: float  # by the profile, in which nothing decodes
    cost_s: float  # as it is believed, and what groups that are even only later cost
    sending: Sending | None = None  # its first stage, if it has two

    @property
    def visits(self) -> int:
        """Of the host."""
        return 1 if self.sending is None else 2


@dataclass(frozen=True)
class MovePrices:
    """What moves between the groups of a layout cost, as this run has seen it."""

    latency: LatencyModel
    costs: SwitchCosts
    limits: SendLimits
    safety: float  # as many times as much two stages are to cost, and still be cheaper

    def cheapest(
        self, load: Load, plan: Plan, group: np.ndarray, step_s: tuple[float, float]
    ) -> PricedMove:
        """
        Args:
          plan: of the next burst, in whose layout sequences go to their `group`, int[live].
          step_s: the profile's of a decode step without drafts, before and after.
        """
        split, drafts = plan.split, plan.predicted if plan.budget else None
        fullest, after = (int(np.bincount(x).max()) for x in (load.group, group))
        words = (
            f"{int((group != load.group).sum())} of {load.live} sequences, from {fullest} to {after} "
            f"in the fullest group of {split}"
        )
        seconds = balance_seconds(self.latency, split, load, group)
        one = PricedMove(words, seconds, self.costs.pages(seconds))
        now_s, then_s = step_s
        uneven_s = self.latency.correction.factor(split) * now_s
        if drafts is not None:
            uneven_s = drafts.step_s
        believed = uneven_s, uneven_s * then_s / now_s
        said = drafts.tokens if drafts is not None else 1.0
        two = two_stages(self.latency, split, load, group, believed, said, self.limits)
        if two is None:
            return one
        cost = self.costs.pages(two.idle_s, visits=2) + two.later_s
        if self.safety * cost >= one.cost_s:
            return one
        words = f"{words}, in two stages with {two.steps} steps between them"
        return PricedMove(words, two.idle_s, cost, Sending(self.limits.rounds, two.steps))


class Stages(NamedTuple):
    """A move in two stages."""

    # By the profile, in which nothing decodes: packing, unpacking, waiting, what follows.
    idle_s: float
    steps: int  # of the burst in between
    later_s: float  # lost because groups are even only behind it


def two_stages(
    latency: LatencyModel,
    split: Split,
    load: Load,
    group: np.ndarray,
    step_s: tuple[float, float],
    said: float,
    limits: SendLimits,
) -> Stages | None:
    """The move of `balance_seconds` when what will not change any more is sent while all decode on.

    The last page of each sequence, and those that are filled meanwhile, follow in a round of each distance.

    Args:
      step_s: of a decode step, seconds as long as sequences are where they are, and in their `group`.
      said: tokens that a row says in a step.

    Returns:
      None where nothing can be sent: it was not measured, or memory holds no round.
    """
    packed_s, way_s = latency.shift_stages(split)
    if not limits.rounds or math.isinf(packed_s + way_s):
        return None
    rounds = rounds_by_distance(latency, split, load, group)
    # One distance after the other.
    sent = np.clip(limits.rounds - (rounds.cumsum() - rounds), 0, rounds)
    sent_s, (uneven_s, even_s) = sent.sum() * way_s, step_s
    steps = limits.every * math.ceil(sent_s / (limits.every * uneven_s))
    steps = min(steps, limits.most)
    grown = replace(load, context=load.context + steps * said)
    last_pages = _most(split, load, group, np.full(load.live, latency.page_size))
    follow = np.maximum(
        rounds_by_distance(latency, split, grown, group) - sent,
        np.ceil(last_pages / latency.round_tokens),
    )
    idle_s = sent.sum() * packed_s + follow.sum() * latency.shift_round(split)
    idle_s += max(0.0, sent_s - steps * uneven_s)
    later_s = steps * max(0.0, uneven_s - even_s)
    return Stages(float(idle_s), steps, float(later_s))
