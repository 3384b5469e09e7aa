"""Who decides the layout of every moment of a rollout. Plans; never touches an array of the model.

`CostModelPlanner` walks a grid of future moments. The length model says how many sequences will
still be live at each, the latency model what a decode step will cost there in each layout and what
a switch costs; dynamic programming over (moment x layout) gives the cheapest path to the end. Only
its first step is carried out: the plan is made anew at every burst, with what really happened, and
what it may cost where it was wrong is kept within a budget (`budget.py`).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from pat_jax.planning.budget import Account, sober
from pat_jax.planning.costs import LARGE_S, CostTables
from pat_jax.planning.forecast import WEIGHTS, Forecast
from pat_jax.planning.latency import LatencyModel
from pat_jax.planning.lengths import LengthModel
from pat_jax.planning.switch_costs import SeenSwitch, SwitchCosts
from pat_jax.planning.types import Carry, Load, Plan, Split


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

    def observe_switch(self, source: Split, plan: Plan, seconds: float) -> None:
        """The switch from `source` that `plan` asked for took `seconds`."""
        del source, plan, seconds


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
    learning: float = 0.2  # least weight of a burst's step time against what was believed
    is_frozen: bool = False  # no cost of a step or a switch is ever corrected: `--deterministic`
    switch_costs: SwitchCosts = field(default_factory=SwitchCosts)  # as this run has seen them
    _account: Account | None = field(default=None, init=False, repr=False)  # of this rollout
    # Profile seconds of a step in each layout when the last burst began, and the tokens then.
    _burst: tuple[np.ndarray, int] | None = field(default=None, init=False, repr=False)
    _asked: SeenSwitch | None = field(default=None, init=False, repr=False)
    _seen: dict[Split, int] = field(default_factory=dict, init=False, repr=False)  # bursts
    _tables: CostTables | None = field(default=None, init=False, repr=False)
    _tables_of: object = field(default=None, init=False, repr=False)

    def start(self, load: Load) -> Split:
        forecast = Forecast.of(load, self.lengths, self.splits, None, self.grid)
        costs = self._costs(forecast)
        total, choices = costs.cheapest(self.safety)
        if not self.switch_costs.seen:
            # To begin elsewhere than where to stay, for the sake of the prefill, stakes a switch
            # whose cost nobody has seen on a small gain: it counts once more.
            total = total + costs.switch[0, np.arange(len(total)), choices[0]]
        start = int(np.argmin(total + costs.prefill))
        self._account, self._burst = Account(costs.prefill, start), None
        return self.splits[start]

    def plan(self, load: Load, current: Split) -> Plan:
        forecast = Forecast.of(load, self.lengths, self.splits, current, self.grid)
        costs, here = self._costs(forecast), self.splits.index(current)
        self._book(load, here, forecast, costs)
        totals, choices = costs.cheapest(self.safety)
        stay, total = float(costs.run[here].sum()), float(totals[here])
        leaves = choices[:, here] != here
        pays = bool(leaves.any()) and stay - total >= self.min_saving * stay
        at = int(leaves.argmax())
        there, live = int(choices[at, here]), int(forecast.fullest[0, here, at])
        saves = f"saves {stay - total:.2f} s of {stay:.2f} s"
        why = (
            f"{current} to {self.splits[there]} at {live} live in the fullest group: {saves}, "
            f"costs {costs.switch[at, here, there]:.2f} s ({costs.way(at, here, there)})"
        )
        if pays and at == 0:
            if self._may_switch(costs, here, there, total):
                return self._switch(costs, here, there, total, why)
            pays, saves = False, f"{saves}, too little past the budget"
        if (due := self._due(costs, here, totals)) is not None:
            return due
        if pays:
            return Plan(current, threshold=live, predicted_remaining_s=total, reason=why)
        why = f"stay in {current}: best alternative {saves}"
        return Plan(current, threshold=0, predicted_remaining_s=stay, reason=why)

    def observe(self, split: Split, rows: int, length: int, seconds: float) -> None:
        if self.is_frozen:
            return
        self._seen[split] = self._seen.get(split, 0) + 1
        weight = max(self.learning, 1 / (1 + self._seen[split]))
        self.latency = self.latency.observed(split, rows, length, seconds, weight=weight)

    def observe_switch(self, source: Split, plan: Plan, seconds: float) -> None:
        assert self._account is not None and self._asked is not None, "it was planned here"
        if self.is_frozen:
            seconds = plan.predicted_cost_s
        remaining_s = plan.predicted_remaining_s - plan.predicted_cost_s
        correction = sober(self.latency, self.splits)
        was_afforded = self._account.affords(seconds, remaining_s, correction)
        self._account.switch(seconds, was_afforded=was_afforded)
        if self.is_frozen:
            return
        self.switch_costs = self.switch_costs.observed(replace(self._asked, actual_s=seconds))

    def _costs(self, forecast: Forecast) -> "Costs":
        tables = self._dense()
        reslice = self.switch_costs.reslice(self.splits, tables.reslice)
        tables = replace(tables, reslice=reslice)
        return Costs.of(tables, self.latency, forecast, self.carry, self.switch_costs)

    def _book(self, load: Load, here: int, forecast: Forecast, costs: "Costs") -> None:
        """Books the burst since the last plan, and notes what the next one will cost in each layout."""
        if self._account is None:
            self._account = Account(costs.prefill, here)
        generated = int(load.generated.max())
        if self._burst is None:
            self.switch_costs = self.switch_costs.aged()  # a rollout begins
        else:
            step_s, before = self._burst
            steps = max(0, generated - before)
            self._account.burst(here, steps * step_s, sober(self.latency, self.splits))
        self._burst = costs.profile_step_s, generated

    def _may_switch(self, costs: "Costs", here: int, there: int, remaining_s: float) -> bool:
        """Within the budget; or it pays several times over, unseen layouts taken soberly."""
        assert self._account is not None
        correction, cost = sober(self.latency, self.splits), float(costs.switch[0, here, there])
        if self._account.affords(cost, remaining_s, correction):
            return True
        hoped = np.array([self.latency.corrected(split) for split in self.splits])
        soberly = replace(costs, run=costs.run * (correction / hoped)[:, None])
        totals, _ = soberly.cheapest(self.safety)
        return float(soberly.run[here].sum() - totals[here]) >= self._account.must_save(cost)

    def _due(self, costs: "Costs", here: int, totals: np.ndarray) -> Plan | None:
        """A switch that the rent of its layout has paid for, whatever may be left to run."""
        assert self._account is not None
        step_s = costs.profile_step_s * sober(self.latency, self.splits)
        there = self._account.due(here, step_s, costs.switch[0, here])
        if there is None:
            return None
        total = self.safety * float(costs.switch[0, here, there]) + float(totals[there])
        lost = f"{self._account.rent_s[there]:.2f} s lost by not being there, as much as it costs"
        why = f"{self.splits[here]} to {self.splits[there]}: {lost}"
        return self._switch(costs, here, there, total, why)

    def _switch(self, costs: "Costs", here: int, there: int, total: float, why: str) -> Plan:
        source, target, carry = self.splits[here], self.splits[there], costs.way(0, here, there)
        cost = float(costs.switch[0, here, there])
        reslice_s = float(self._dense().reslice[here, there])
        kv_s = (cost - float(costs.tables.reslice[here, there])) / self.switch_costs.kv(carry)
        self._asked = SeenSwitch(source, target, carry, reslice_s, kv_s, actual_s=cost)
        return Plan(
            target,
            threshold=0,
            carry=carry,
            predicted_saving_s=float(costs.run[here].sum()) - total,
            predicted_cost_s=cost,
            predicted_remaining_s=total,
            reason=why,
        )

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
    profile_step_s: np.ndarray  # float[split], of a decode step at the first moment, uncorrected

    @classmethod
    def of(
        cls,
        tables: CostTables,
        latency: LatencyModel,
        forecast: Forecast,
        carry: Carry | Literal["auto"],
        switch_costs: SwitchCosts,
    ) -> "Costs":
        fullest, context = forecast.fullest[0], forecast.context
        correction = np.array([latency.corrected(split) for split in tables.splits])
        step = np.tensordot(WEIGHTS, tables.steps(forecast.fullest, context), axes=1)
        run = step * forecast.steps * forecast.any_live
        migrate = tables.migrations(fullest, context) * switch_costs.kv("migrate")
        prefill = tables.recomputations(fullest, context)
        recompute = prefill * switch_costs.kv("recompute")
        if carry == "migrate":
            recompute = np.full_like(recompute, LARGE_S)
        elif carry == "recompute":
            migrate = np.full_like(migrate, LARGE_S)
        switch = np.minimum(migrate, recompute[None]) + tables.reslice[:, :, None]
        diagonal = np.arange(len(tables.splits))
        switch[diagonal, diagonal] = 0.0
        run *= correction[:, None]
        switch = np.moveaxis(switch, -1, 0)
        return cls(
            tables, forecast.any_live, run, migrate, recompute, switch, prefill[:, 0], step[:, 0]
        )

    def way(self, at: int, source: int, target: int) -> Carry:
        is_cheaper = self.recompute[target, at] < self.migrate[source, target, at]
        return "recompute" if is_cheaper else "migrate"

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
