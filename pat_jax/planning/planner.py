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
from pat_jax.planning.compilation import Uncompiled, follow
from pat_jax.planning.costs import LARGE_S, CostTables
from pat_jax.planning.forecast import WEIGHTS, Forecast
from pat_jax.planning.latency import LatencyModel
from pat_jax.planning.lengths import LengthModel
from pat_jax.planning.memory import Fits, MemoryModel
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
    memory: MemoryModel | None = None  # a layout without room is no candidate
    uncompiled: Uncompiled | None = None  # layouts that no plan leads to until they are compiled
    _tables: CostTables | None = field(default=None, init=False, repr=False)
    _tables_of: object = field(default=None, init=False, repr=False)

    def start(self, load: Load) -> Split:
        forecast = Forecast.of(load, self.lengths, self.splits, None, self.grid)
        costs = self._within_memory(self._costs(forecast), forecast, load)
        costs = self._compiled_only(costs, None)
        total, _ = costs.cheapest(self.safety)
        return self.splits[int(np.argmin(total + costs.prefill))]

    def plan(self, load: Load, current: Split) -> Plan:
        forecast = Forecast.of(load, self.lengths, self.splits, current, self.grid)
        priced = self._costs(forecast)
        here = self.splits.index(current)
        costs = self._compiled_only(self._within_memory(priced, forecast, load), here)
        _, choices = costs.cheapest(self.safety)
        stay = float(priced.run[here].sum())
        total = priced.seconds(here, follow(choices, here), self.safety)
        saving, is_full = stay - total, bool((costs.run[here] > priced.run[here]).any())
        leaves = choices[:, here] != here
        if not leaves.any() or (saving < self.min_saving * stay and not is_full):
            why = f"stay in {current}: best alternative saves {saving:.2f} s of {stay:.2f} s"
            return Plan(current, threshold=0, predicted_remaining_s=stay, reason=why)
        at = int(leaves.argmax())
        there = int(choices[at, here])
        target, live = self.splits[there], int(forecast.fullest[0, here, at])
        below, carry_s = self._carry(load, current, target, costs.only_way(at, here, there))
        cost = carry_s + self.latency.reslice(current, target)
        why = (
            f"{current} to {target} at {live} live in the fullest group: "
            f"saves {saving:.2f} s of {stay:.2f} s, costs {cost:.2f} s ({WAYS.get(below, 'mixed')})"
            f"{f'; {current} would not hold the KV cache to the end' if is_full else ''}"
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

    def _carry(
        self, load: Load, source: Split, target: Split, only: OneWay | None
    ) -> tuple[int, float]:
        """The way that the sequences would go now, as `Plan.recompute_below`, and its seconds."""
        if only is None:
            return cheapest_carry(self.latency, source, target, load)
        below = recompute_below(only)
        return below, carry_seconds(self.latency, source, target, load, below)

    def observe(self, split: Split, rows: int, length: int, seconds: float) -> None:
        if self.is_frozen:
            return
        if self.memory and not self.memory.holds(split, rows, length):
            return  # it was taken not to fit, and so was never measured
        self.latency = self.latency.observed(split, rows, length, seconds)

    def _costs(self, forecast: Forecast) -> "Costs":
        return Costs.of(self._dense(), self.latency, forecast, self.carry)

    def _within_memory(self, costs: "Costs", forecast: Forecast, load: Load) -> "Costs":
        if self.memory is None or not self.memory.is_limited:
            return costs
        last = int((load.context + load.budget).max())
        return costs.where(self.memory.fits(self.splits, forecast, last))

    def _compiled_only(self, costs: "Costs", here: int | None) -> "Costs":
        if self.uncompiled is None or not self.uncompiled.compile_s:
            return costs
        return self.uncompiled.leave_out(costs, here, self.safety, self.min_saving)

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
    prefill: np.ndarray  # float[split], seconds, to begin there with the cache of the first moment

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
        prefill = recompute[:, 0]
        if carry == "migrate":
            recompute = np.full_like(recompute, LARGE_S)
        elif carry == "recompute":
            migrate = np.full_like(migrate, LARGE_S)
        switch = np.minimum(migrate, recompute[None]) + tables.reslice[:, :, None]
        diagonal = np.arange(len(tables.splits))
        switch[diagonal, diagonal] = 0.0
        run *= correction[:, None]
        switch = np.moveaxis(switch, -1, 0)
        return cls(tables, forecast.any_live, run, migrate, recompute, switch, prefill)

    def where(self, fits: Fits) -> "Costs":
        """The same, with what has no room priced out of every plan."""
        migrate = np.where(fits.migrate, self.migrate, LARGE_S)
        recompute = np.where(fits.recompute, self.recompute, LARGE_S)
        switch = np.minimum(migrate, recompute[None]) + self.tables.reslice[:, :, None]
        switch = np.where(fits.reslice, switch, LARGE_S)
        diagonal = np.arange(len(self.run))
        switch[diagonal, diagonal] = 0.0
        return replace(
            self,
            run=np.where(fits.run, self.run, LARGE_S * self.any_live),
            migrate=migrate,
            recompute=recompute,
            switch=np.moveaxis(switch, -1, 0),
            prefill=np.where(fits.recompute[:, 0], self.prefill, LARGE_S),
        )

    def only_way(self, at: int, source: int, target: int) -> OneWay | None:
        """The way that is left where the other is not allowed or has no room."""
        if self.migrate[source, target, at] >= LARGE_S:
            return "recompute"
        return "migrate" if self.recompute[target, at] >= LARGE_S else None

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

    def seconds(self, start: int, path: np.ndarray, safety: float) -> float:
        """Expected seconds of a path from `start`, int[moments]."""
        at, before = np.arange(len(path)), np.concatenate([[start], path[:-1]])
        switches = self.switch[at, before, path] * self.any_live
        return float(self.run[path, at].sum() + safety * switches.sum())
