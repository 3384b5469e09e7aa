"""Who decides the layout of every moment of a rollout. Plans; never touches an array of the model.

`CostModelPlanner` walks a grid of future moments. The length model says how many sequences will
still be live at each, the latency model what a decode step will cost there in each layout and what
a switch costs; dynamic programming over (moment x layout) gives the cheapest path to the end. Only
its first step is carried out: the plan is made anew at every burst, with what really happened.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pat_jax.planning.latency import LatencyModel
from pat_jax.planning.lengths import LengthModel
from pat_jax.planning.types import Carry, Load, Plan, Split


class Planner(ABC):
    @abstractmethod
    def start(self, load: Load) -> Split:
        """The layout in which a rollout of `load` begins (all groups counted as one: group 0)."""

    @abstractmethod
    def plan(self, load: Load, current: Split) -> Plan:
        """The layout of the next burst and when to end it."""


@dataclass(frozen=True)
class FixedLayout(Planner):
    """One layout for good."""

    split: Split

    def start(self, load: Load) -> Split:
        del load
        return self.split

    def plan(self, load: Load, current: Split) -> Plan:
        del load, current
        return Plan(self.split, threshold=0, reason="pinned")


@dataclass(frozen=True)
class ScriptedPath(Planner):
    """Follows a script: from `first`, to each (split, live) in turn once `live` or fewer are live."""

    first: Split
    steps: tuple[tuple[Split, int], ...]
    carry: Carry = "migrate"

    def start(self, load: Load) -> Split:
        del load
        return self.first

    def plan(self, load: Load, current: Split) -> Plan:
        del current
        due = [split for split, at in self.steps if load.live <= at]
        to_come = [at for _, at in self.steps if load.live > at]
        split = due[-1] if due else self.first
        # Stop when the groups' fullest could mean that the total has been reached.
        threshold = max(to_come, default=0) // split.dp
        return Plan(split, threshold, carry=self.carry, reason="scripted")


@dataclass
class CostModelPlanner(Planner):
    """Dynamic programming over the expected survival of the running sequences."""

    splits: tuple[Split, ...]
    latency: LatencyModel
    lengths: LengthModel
    carry: Carry | Literal["auto"] = "auto"  # or the only way allowed
    safety: float = 1.2  # a predicted switch cost is counted this many times
    min_saving: float = 0.02  # of the predicted remaining time: less is noise, not a reason
    grid: int = 48  # future moments looked at

    def start(self, load: Load) -> Split:
        forecast = self._forecast(load)
        totals = {split: self._value(forecast, split)[0] for split in self.splits}
        return min(totals, key=totals.__getitem__)

    def plan(self, load: Load, current: Split) -> Plan:
        forecast = self._forecast(load, current)
        stay = self._stay(forecast, current)
        total, path = self._value(forecast, current)
        saving = stay - total
        moments = [
            (j, split) for j, split in enumerate(path) if split != (path[j - 1] if j else current)
        ]
        if not moments or saving < self.min_saving * stay:
            why = f"stay in {current}: best alternative saves {saving:.2f} s of {stay:.2f} s"
            return Plan(current, threshold=0, predicted_remaining_s=stay, reason=why)
        at, target = moments[0]
        cost, carry = self._switch_cost(forecast, at, current, target)
        live = int(forecast.fullest[current][at])
        why = (
            f"{current} to {target} at {live} live in the fullest group: "
            f"saves {saving:.2f} s of {stay:.2f} s, costs {cost:.2f} s ({carry})"
        )
        if at > 0:
            return Plan(current, threshold=live, predicted_remaining_s=total, reason=why)
        return Plan(
            target,
            threshold=0,
            carry=carry,
            predicted_saving_s=saving,
            predicted_cost_s=cost,
            predicted_remaining_s=total,
            reason=why,
        )

    def _forecast(self, load: Load, current: Split | None = None) -> "Forecast":
        horizon = int(load.budget.max())
        # Finer near the present, where the decision falls.
        edges = np.unique(np.round(horizon * np.linspace(0, 1, self.grid + 1) ** 2).astype(int))
        moments = edges[:-1]
        survive = self.lengths.survival(load.generated, load.budget, moments)
        return Forecast.of(load, survive, edges, self.splits, current)

    def _step_costs(self, forecast: "Forecast", split: Split) -> np.ndarray:
        seconds = [
            self.latency.decode_step(split, int(np.ceil(live)), int(context))
            for live, context in zip(forecast.fullest[split], forecast.context, strict=True)
        ]
        return np.array(seconds) * forecast.steps * forecast.any_live

    def _stay(self, forecast: "Forecast", split: Split) -> float:
        return float(self._step_costs(forecast, split).sum())

    def _value(self, forecast: "Forecast", current: Split) -> tuple[float, list[Split]]:
        """Cheapest expected seconds from `current` to the end, and the layout of every moment."""
        costs = {split: self._step_costs(forecast, split) for split in self.splits}
        after = dict.fromkeys(self.splits, 0.0)
        choices: list[dict[Split, Split]] = []
        for j in reversed(range(len(forecast.steps))):
            run = {split: costs[split][j] + after[split] for split in self.splits}
            choice, value = {}, {}
            for split in self.splits:
                options = {
                    target: run[target]
                    + (
                        0.0
                        if target == split
                        else self._weighted_switch(forecast, j, split, target)
                    )
                    for target in self.splits
                }
                choice[split] = min(options, key=options.__getitem__)
                value[split] = options[choice[split]]
            choices.append(choice)
            after = value
        path, at = [], current
        for choice in reversed(choices):
            at = choice[at]
            path.append(at)
        return after[current], path

    def _weighted_switch(self, forecast: "Forecast", j: int, source: Split, target: Split) -> float:
        return (
            self.safety * forecast.any_live[j] * self._switch_cost(forecast, j, source, target)[0]
        )

    def _switch_cost(
        self, forecast: "Forecast", j: int, source: Split, target: Split
    ) -> tuple[float, Carry]:
        live, context = forecast.fullest[source][j], int(forecast.context[j])
        ways: dict[Carry, float] = {
            "migrate": self.latency.migrate(source, target, int(np.ceil(live)), context),
            "recompute": self.latency.recompute(
                target, int(np.ceil(forecast.fullest[target][j])), context
            ),
        }
        if self.carry != "auto":
            ways = {self.carry: ways[self.carry]}
        carry = min(ways, key=ways.__getitem__)
        return self.latency.reslice(source, target) + ways[carry], carry


@dataclass(frozen=True)
class Forecast:
    """What is expected at each of a few future moments."""

    steps: np.ndarray  # decode steps until the next moment
    any_live: np.ndarray  # probability that the rollout is still going
    context: np.ndarray  # tokens in the cache of the longest sequence
    fullest: dict[Split, np.ndarray]  # expected live sequences of the fullest group

    @classmethod
    def of(
        cls,
        load: Load,
        survive: np.ndarray,  # [live, moments]
        edges: np.ndarray,
        splits: tuple[Split, ...],
        current: Split | None,
    ) -> "Forecast":
        variance = survive * (1 - survive)
        expected = survive.sum(axis=0)
        fullest = {}
        for split in splits:
            if split == current:
                groups = range(int(load.group.max()) + 1)
                per_group = np.array([survive[load.group == g].sum(axis=0) for g in groups])
                spread = np.array([variance[load.group == g].sum(axis=0) for g in groups])
                fullest[split] = (per_group + _max_of(split.dp) * np.sqrt(spread)).max(axis=0)
            else:
                mean = expected / split.dp
                spread = np.sqrt(variance.sum(axis=0) / split.dp)
                fullest[split] = mean + _max_of(split.dp) * spread
            fullest[split] = np.clip(fullest[split], 1, np.ceil(load.live))
        # The longest context that is still expected to be live, or the likeliest to be.
        running = (survive > 0.5 / max(load.live, 1)) | (survive == survive.max(axis=0))
        moments = edges[:-1]
        context = (np.where(running, load.context[:, None], 0) + moments[None, :]).max(axis=0)
        return cls(np.diff(edges), 1 - np.prod(1 - survive, axis=0), context, fullest)


def _max_of(n: int) -> float:
    """Expected maximum of n standard normal numbers, roughly (0 for one)."""
    return 0.0 if n == 1 else float(np.sqrt(2 * np.log(n)) * 0.7)
