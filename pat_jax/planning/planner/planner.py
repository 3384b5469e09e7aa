"""Planners choose the layout at every moment of a rollout, and never touch an array of the model.

`CostModelPlanner` walks a grid of future moments. The length model predicts how many sequences will
still be running at each. The latency model predicts what a decode step will cost there in each
layout, and what a switch costs. Dynamic programming over (moment x layout) gives the cheapest path
to the end. Only its first step is carried out: the plan is made anew at every burst, from what has
happened meanwhile. A budget limits what wrong predictions may cost (`budget.py`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pat_jax.planning.draft_counts import DraftResult
from pat_jax.planning.drafts import Acceptance
from pat_jax.planning.latency.correction import Correction
from pat_jax.planning.latency.model import LatencyModel
from pat_jax.planning.latency.switch_costs import SeenSwitch, SwitchCosts
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.memory import MemoryModel
from pat_jax.planning.planner.balance import Unevenness, balance_plan, balance_seconds
from pat_jax.planning.planner.budget import MULTIPLE, RegretBudget
from pat_jax.planning.planner.carry import switch_plan
from pat_jax.planning.planner.costs import CostTables
from pat_jax.planning.planner.forecast import Forecast
from pat_jax.planning.planner.priced import SAFETY, Costs, follow
from pat_jax.planning.types import (
    UNLIMITED,
    BurstResult,
    DraftLimits,
    Load,
    Moved,
    Outcome,
    Plan,
    Split,
)

MIN_SAVING = 0.02  # share of the predicted remaining time: less is noise, no reason to switch
GRID = 48  # number of future moments that a plan prices


class Planner(ABC):
    @abstractmethod
    def start(self, load: Load) -> Split:
        """Returns the layout in which a rollout begins; `load` has all sequences in replica 0."""

    @abstractmethod
    def decide(self, load: Load, current: Split, options: Sequence[np.ndarray] = ()) -> Plan:
        """Returns the plan of the next burst: its layout, when it ends, and which sequences change
        replicas.

        Args:
          options: other assignments of the running sequences to replicas of the current layout,
            more even than the present one; int[running] each.
        """

    def observe(self, outcome: Outcome) -> None:
        """Receives the outcome of a decision. A planner may learn from the seconds that it took."""
        del outcome

    @property
    def expects(self) -> LengthModel | None:
        """The length model that the planner uses, or None if it uses none."""
        return None

    def observe_rollout(self, lengths: LengthModel) -> None:
        """Receives the length model for the next rollouts, updated with the last rollout."""
        del lengths


@dataclass
class CostModelPlanner(Planner):
    """Plans by dynamic programming over the expected survival of the running sequences."""

    splits: tuple[Split, ...]
    latency: LatencyModel
    lengths: LengthModel
    is_frozen: bool = False  # costs of steps and switches are never corrected: `--deterministic`
    # Sizes of pools: in small ones sequences take turns. Layouts that do not fit are left out.
    memory: MemoryModel | None = None
    acceptance: Acceptance | None = None  # how many draft tokens are accepted; None: no drafts
    drafts: DraftLimits = UNLIMITED
    switch_costs: SwitchCosts = field(default_factory=SwitchCosts)  # learned in this run
    balance_costs: SwitchCosts = field(default_factory=SwitchCosts)  # of moves between replicas
    _regret_budget: RegretBudget | None = field(default=None, init=False, repr=False)
    _uneven: Unevenness = field(default_factory=Unevenness, init=False, repr=False)
    _undrafted_s: float = field(default=0.0, init=False, repr=False)  # since a burst had drafts
    # The latency model's decode table, and the arrays made from that model.
    _tables: tuple[object, CostTables] | None = field(default=None, init=False, repr=False)

    def start(self, load: Load) -> Split:
        # Does not assume even replicas: short rollouts end before a move that evens them pays.
        forecast = Forecast.of(load, self.lengths, self.splits, None, GRID)
        costs = self._costs(forecast)
        total, choices = costs.cheapest()
        if not self.switch_costs.seen:
            # To begin in one layout for its prefill, and then switch, stakes a switch of unknown
            # cost on a small gain. So that switch counts twice.
            total = total + costs.switch[0, np.arange(len(total)), choices[0]]
        start = int(np.argmin(total + costs.prefill))
        self._regret_budget = RegretBudget(costs.prefill, start)
        self._uneven = Unevenness()
        self.switch_costs = self.switch_costs.aged()
        self.balance_costs = self.balance_costs.aged()
        return self.splits[start]

    def rollout_s(self, load: Load) -> float:
        """Returns the predicted seconds of a rollout of `load` that has not begun."""
        costs = self._costs(Forecast.of(load, self.lengths, self.splits, None, GRID))
        return float((costs.cheapest()[0] + costs.prefill).min())

    def decide(self, load: Load, current: Split, options: Sequence[np.ndarray] = ()) -> Plan:
        # Sequences move between the replicas of a layout where those are uneven.
        moves = (self.latency.shift_round(one) < math.inf for one in self.splits if one.dp > 1)
        forecast, costs = self._outlook(load, current, is_evened=not load.waiting and all(moves))
        here = self.splits.index(current)
        self._regret_budget = self._regret_budget or RegretBudget(costs.prefill, here)
        self._regret_budget.expect(here, costs.profile_step_s, load.step)
        plan = self._drafted(self._path(load, current, forecast, costs), costs)
        return self._evened(load, plan, options) if plan.split == current else plan

    def _drafted(self, plan: Plan, costs: Costs) -> Plan:
        """Returns `plan`, with drafts if they pay or a trial is due."""
        there = self.splits.index(plan.split)
        num_draft_tokens = costs.drafting.num_draft_tokens(there, self._undrafted_s)
        if not num_draft_tokens or self.acceptance is None:
            return plan
        times = self.latency.correction.factor(plan.split)
        predicted = costs.drafting.predicted(there, num_draft_tokens, times)
        drafts = {"num_draft_tokens": num_draft_tokens, "accept_prob": self.acceptance.accept_prob}
        return replace(plan, **drafts, predicted=predicted)

    def _path(self, load: Load, current: Split, forecast: Forecast, costs: Costs) -> Plan:
        here = self.splits.index(current)
        _, choices = costs.cheapest()
        stay = float(costs.run[here].sum())
        path = follow(choices, here)
        total = costs.seconds(here, path)
        leaves = choices[:, here] != here
        pays = bool(leaves.any()) and stay - total >= MIN_SAVING * stay
        at = int(leaves.argmax())
        there = int(choices[at, here])
        running = int(forecast.fullest[0, here, at])
        saves = f"saves {stay - total:.2f} s of {stay:.2f} s"
        why = f"{current} to {self.splits[there]} at {running} running in the fullest replica: {saves}"
        if pays and at == 0:
            if self._may_switch(costs, here, path, total):
                pair = here, there
                reshard_s = float(self._dense().reshard[pair])
                plan = switch_plan(self.latency, self.switch_costs, costs, load, pair, reshard_s)
                predicted = {"predicted_saving_s": stay - total, "predicted_remaining_s": total}
                return replace(plan, **predicted, reason=f"{why}, {plan.reason}")
            pays = False
            saves = f"{saves}, too little past the budget"
        if pays:
            return Plan(current, threshold=running, predicted_remaining_s=total, reason=why)
        other = f"no other saves any of {stay:.2f} s"
        if leaves.any():
            other = f"{self.splits[there]} {saves}"
        why = f"stay in {current}: {other}"
        return Plan(current, threshold=0, predicted_remaining_s=stay, reason=why)

    def observe(self, outcome: Outcome) -> None:
        match outcome:
            case BurstResult() if not self.is_frozen:
                self.latency = self.latency.observed(outcome)
                undrafted_s = self._undrafted_s + outcome.seconds
                self._undrafted_s = 0.0 if outcome.num_draft_tokens else undrafted_s
            case DraftResult() if self.acceptance is not None and not self.is_frozen:
                self.acceptance = self.acceptance.observed(outcome)
            case Moved() if outcome.plan.replica is None:
                self._observe_switch(outcome)
            case Moved():
                self._observe_balance(outcome)

    @property
    def expects(self) -> LengthModel:
        return self.lengths

    def observe_rollout(self, lengths: LengthModel) -> None:
        self.lengths = lengths

    def _observe_switch(self, outcome: Moved) -> None:
        plan = outcome.plan
        assert self._regret_budget is not None and plan.prediction is not None, "planned here"
        seconds = plan.predicted_cost_s if self.is_frozen else outcome.seconds
        self._regret_budget.switch(seconds)
        if not self.is_frozen:
            # If pages lack, some sequences are recomputed that were planned to migrate.
            seen = SeenSwitch.of(plan.prediction, outcome.carry, seconds)
            self.switch_costs = self.switch_costs.observed(seen)

    def _observe_balance(self, outcome: Moved) -> None:
        prediction = outcome.plan.prediction
        assert self._regret_budget is not None, "planned here"
        assert prediction is not None and prediction.step_s is not None
        seconds = prediction.kv_s if self.is_frozen else outcome.seconds
        self._regret_budget.balance(seconds, prediction.step_s)
        self._uneven.moved()
        if outcome.is_whole and not self.is_frozen:
            seen = SeenSwitch.of(prediction, outcome.carry, seconds)
            self.balance_costs = self.balance_costs.observed(seen)

    def _evened(self, load: Load, plan: Plan, options: Sequence[np.ndarray]) -> Plan:
        """Returns `plan` with the best option, if it saves more than `SAFETY` times its cost."""
        split = plan.split
        self._uneven.see(load, split, self._dense(), self.latency.correction.factor(split))
        options = [replica for replica in options if self._may_pay(load, split, replica)]
        if not options or self.latency.shift_round(split) == math.inf:
            return plan
        stay, _ = self._remaining(load, plan)
        best = plan
        most = 0.0
        for replica in options:
            left, then_s = self._remaining(replace(load, replica=replica), plan)
            pages_s = balance_seconds(self.latency, split, load, replica)
            cost_s = self.balance_costs.pages(pages_s)
            if (gain := stay - left - SAFETY * cost_s) > most:
                best = balance_plan(plan, load, replica, (stay, left), (pages_s, cost_s), then_s)
                most = gain
        return best

    def _may_pay(self, load: Load, split: Split, replica: np.ndarray) -> bool:
        if not self._dense().is_within_bucket(load.replica, replica):
            return True
        cost_s = self.balance_costs.pages(balance_seconds(self.latency, split, load, replica))
        return self._uneven.lost_s + self._uneven.next_s > SAFETY * cost_s

    def _remaining(self, load: Load, plan: Plan) -> tuple[float, np.ndarray]:
        """Returns seconds to the end under `plan`, and profiled seconds of a step by layout."""
        here = self.splits.index(plan.split)
        _, costs = self._outlook(load, plan.split)
        seconds = float(costs.run[here].sum())
        if plan.threshold:
            seconds = costs.seconds(here, follow(costs.cheapest()[1], here))
        return seconds, costs.profile_step_s

    def _outlook(
        self, load: Load, current: Split, *, is_evened: bool = False
    ) -> tuple[Forecast, Costs]:
        """Returns the forecast of `load`, and its costs; no layout is chosen that does not fit."""
        # A sequence that waits although there are rows waits for pages.
        waits_for_rows = self.memory is None or load.running >= self._dense().capacity
        kind = {"rows_vary": not waits_for_rows, "is_evened": is_evened}
        forecast = Forecast.of(load, self.lengths, self.splits, current, GRID, **kind)
        return forecast, self._costs(forecast)

    def _costs(self, forecast: Forecast) -> Costs:
        tables = self._dense()
        memory = self.memory
        reshard = self.switch_costs.reshard(self.splits, tables.reshard)
        tables = replace(tables, reshard=reshard)
        seen = self.switch_costs
        costs = Costs.of(tables, self.latency, forecast, seen, memory, self.acceptance, self.drafts)
        if memory is None:
            return costs
        return costs.where(memory.has_room(self.splits), memory.may_switch(self.splits))

    def _may_switch(self, costs: Costs, here: int, path: np.ndarray, remaining_s: float) -> bool:
        """Returns whether a switch is in the budget, or saves enough by `sober_factors`."""
        account = self._regret_budget
        cost = float(costs.switch[0, here, path[0]])
        assert account is not None
        correction = self.latency.correction.sober_factors(self.splits)
        if account.affords(cost, remaining_s, correction):
            return True
        hoped = np.array([self.latency.correction.factor(split) for split in self.splits])
        soberly = costs.slower(correction / hoped)
        # The path without this switch stays here until its next switch.
        is_later = np.logical_or.accumulate(path != path[0])
        without = soberly.seconds(here, np.where(is_later, path, here))
        return without - soberly.seconds(here, path) >= MULTIPLE * cost

    def _dense(self) -> CostTables:
        """Returns the latency model's tables as arrays, without its correction by this run."""
        known = self.latency.decode_table
        if self._tables is None or self._tables[0] is not known:
            bare = replace(self.latency, correction=Correction())
            self._tables = known, CostTables.of(bare, self.splits)
        return self._tables[1]
