"""Who decides the layout of every moment of a rollout. Plans; never touches an array of the model.

`CostModelPlanner` walks a grid of future moments. The length model says how many sequences will
still be live at each, the latency model what a decode step will cost there in each layout and what
a switch costs; dynamic programming over (moment x layout) gives the cheapest path to the end. Only
its first step is carried out: the plan is made anew at every burst, with what really happened.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from pat_jax.planning.carry import carry_seconds, cheapest_carry
from pat_jax.planning.costs import LARGE_S, CostTables
from pat_jax.planning.forecast import WEIGHTS, Forecast
from pat_jax.planning.latency import LatencyModel
from pat_jax.planning.lengths import LengthModel
from pat_jax.planning.types import MIGRATE_ALL, RECOMPUTE_ALL, Load, Plan, Split

OneWay = Literal["migrate", "recompute"]


WAYS: dict[int, OneWay] = {MIGRATE_ALL: "migrate", RECOMPUTE_ALL: "recompute"}


def recompute_below(way: OneWay) -> int:
    """As `Plan` has it, when all sequences go the same way."""
    return MIGRATE_ALL if way == "migrate" else RECOMPUTE_ALL


class Planner(ABC):
    @abstractmethod
    def start(self, load: Load) -> Split:
        """The layout in which a rollout of `load` begins (all groups counted as one: group 0)."""

    @abstractmethod
    def plan(self, load: Load, current: Split) -> Plan:
        """The layout of the next burst and when to end it."""

    def observe(self, split: Split, rows: int, length: int, seconds: float) -> None:
        """A burst ran in these buckets with `seconds` a step; a planner may learn from it."""
        del split, rows, length, seconds


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


class Step(NamedTuple):
    """Of a script: go to `split` once `live` or fewer sequences are unfinished."""

    split: Split
    live: int
    recompute_below: int = MIGRATE_ALL  # see Plan


@dataclass(frozen=True)
class ScriptedPath(Planner):
    """Follows a script, from `first` on."""

    first: Split
    steps: tuple[Step, ...]

    def start(self, load: Load) -> Split:
        del load
        return self.first

    def plan(self, load: Load, current: Split) -> Plan:
        del current
        due = [step for step in self.steps if load.live <= step.live]
        to_come = [step.live for step in self.steps if load.live > step.live]
        now = due[-1] if due else Step(self.first, 0)
        # Stop when the groups' fullest could mean that the total has been reached.
        threshold = max(to_come, default=0) // now.split.dp
        return Plan(now.split, threshold, now.recompute_below, reason="scripted")


@dataclass
class CostModelPlanner(Planner):
    """Dynamic programming over the expected survival of the running sequences."""

    splits: tuple[Split, ...]
    latency: LatencyModel
    lengths: LengthModel
    carry: OneWay | Literal["auto"] = "auto"  # or the only way allowed
    safety: float = 1.2  # a predicted switch cost is counted this many times
    min_saving: float = 0.02  # of the predicted remaining time: less is noise, not a reason
    grid: int = 48  # future moments looked at
    is_frozen: bool = False  # the latency model is never corrected: `--deterministic`
    _tables: CostTables | None = field(default=None, init=False, repr=False)
    _tables_of: object = field(default=None, init=False, repr=False)

    def start(self, load: Load) -> Split:
        forecast = Forecast.of(load, self.lengths, self.splits, None, self.grid)
        costs = Costs.of(self._dense(), self.latency, forecast, self.carry)
        prefill = costs.tables.recomputations(forecast.fullest[0], forecast.context)[:, 0]
        total, _ = costs.cheapest(self.safety)
        return self.splits[int(np.argmin(total + prefill))]

    def plan(self, load: Load, current: Split) -> Plan:
        forecast = Forecast.of(load, self.lengths, self.splits, current, self.grid)
        costs = Costs.of(self._dense(), self.latency, forecast, self.carry)
        here = self.splits.index(current)
        totals, choices = costs.cheapest(self.safety)
        stay, total = float(costs.run[here].sum()), float(totals[here])
        saving = stay - total
        leaves = choices[:, here] != here
        if not leaves.any() or saving < self.min_saving * stay:
            why = f"stay in {current}: best alternative saves {saving:.2f} s of {stay:.2f} s"
            return Plan(current, threshold=0, predicted_remaining_s=stay, reason=why)
        at = int(leaves.argmax())
        there = int(choices[at, here])
        target, live = self.splits[there], int(forecast.fullest[0, here, at])
        below, carry_s = self._carry(load, current, target)
        cost = carry_s + self.latency.reslice(current, target)
        why = (
            f"{current} to {target} at {live} live in the fullest group: "
            f"saves {saving:.2f} s of {stay:.2f} s, costs {cost:.2f} s ({WAYS.get(below, 'mixed')})"
        )
        if at > 0:
            return Plan(current, threshold=live, predicted_remaining_s=total, reason=why)
        return Plan(
            target,
            threshold=0,
            recompute_below=below,
            predicted_saving_s=saving,
            predicted_cost_s=cost,
            predicted_remaining_s=total,
            reason=why,
        )

    def _carry(self, load: Load, source: Split, target: Split) -> tuple[int, float]:
        """The way that the sequences would go now, as `Plan.recompute_below`, and its seconds."""
        if self.carry == "auto":
            return cheapest_carry(self.latency, source, target, load)
        below = recompute_below(self.carry)
        return below, carry_seconds(self.latency, source, target, load, below)

    def observe(self, split: Split, rows: int, length: int, seconds: float) -> None:
        if self.is_frozen:
            return
        self.latency = self.latency.observed(split, rows, length, seconds)

    def _dense(self) -> CostTables:
        """The latency model's tables as arrays; its corrections are not in them."""
        if self._tables is None or self._tables_of is not self.latency.decode_table:
            self._tables = CostTables.of(replace(self.latency, correction={}), self.splits)
            self._tables_of = self.latency.decode_table
        return self._tables


@dataclass(frozen=True)
class Costs:
    """A forecast, priced: what running and switching will cost at each of its moments."""

    tables: CostTables
    any_live: np.ndarray  # float[moments], probability that it comes to that
    run: np.ndarray  # float[split, moments], expected seconds until the next moment
    migrate: np.ndarray  # float[from, to, moments], seconds
    recompute: np.ndarray  # float[to, moments], seconds
    switch: np.ndarray  # float[moments, from, to], seconds with the cheaper way; 0 to stay

    @classmethod
    def of(
        cls,
        tables: CostTables,
        latency: LatencyModel,
        forecast: Forecast,
        carry: OneWay | Literal["auto"],
    ) -> "Costs":
        fullest, context = forecast.fullest[0], forecast.context
        correction = np.array([latency.corrected(split) for split in tables.splits])
        step = np.tensordot(WEIGHTS, tables.steps(forecast.fullest, context), axes=1)
        run = step * forecast.steps * forecast.any_live
        migrate = tables.migrations(fullest, forecast.live, forecast.mean_context)
        recompute = tables.recomputations(fullest, context)
        if carry == "migrate":
            recompute = np.full_like(recompute, LARGE_S)
        elif carry == "recompute":
            migrate = np.full_like(migrate, LARGE_S)
        switch = np.minimum(migrate, recompute[None]) + tables.reslice[:, :, None]
        diagonal = np.arange(len(tables.splits))
        switch[diagonal, diagonal] = 0.0
        run *= correction[:, None]
        return cls(tables, forecast.any_live, run, migrate, recompute, np.moveaxis(switch, -1, 0))

    def cheapest(self, safety: float) -> tuple[np.ndarray, np.ndarray]:
        """Expected seconds to the end from each split, and the split to run in, int[moments, from]."""
        num_moments, num_splits = len(self.any_live), len(self.run)
        # through[j, a, b]: at moment j go from a to b (or stay) and run there to moment j + 1.
        through = self.switch * (safety * self.any_live)[:, None, None] + self.run.T[:, None, :]
        choices = np.empty((num_moments, num_splits), int)
        after = np.zeros(num_splits)
        for j in range(num_moments - 1, -1, -1):
            options = through[j] + after
            choices[j] = options.argmin(axis=1)
            after = options.min(axis=1)
        return after, choices
