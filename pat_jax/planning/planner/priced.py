"""Prices a forecast: seconds to begin, run and switch in each layout, and the cheapest path."""

from dataclasses import dataclass, replace

import numpy as np

from pat_jax.planning.drafts import Acceptance
from pat_jax.planning.latency.correction import Correction
from pat_jax.planning.latency.model import LatencyModel
from pat_jax.planning.latency.switch_costs import SwitchCosts
from pat_jax.planning.memory import MemoryModel
from pat_jax.planning.planner.costs import LARGE_S, CostTables
from pat_jax.planning.planner.drafting import Drafting, PoolPressure, cheapest_steps
from pat_jax.planning.planner.forecast import Forecast
from pat_jax.planning.types import UNLIMITED, DraftLimits, OneWay

SAFETY = 1.2  # factor by which the predicted cost of a move is raised


@dataclass(frozen=True)
class Costs:
    """Prices of a forecast: what running and switching will cost at each of its moments."""

    tables: CostTables
    any_running: np.ndarray  # float[moments], probability that any sequence is still running
    run: np.ndarray  # float[split, moments], expected seconds until the next moment
    migrate: np.ndarray  # float[from, to, moments], seconds
    recompute: np.ndarray  # float[to, moments], seconds
    switch: np.ndarray  # float[moments, from, to], seconds with the cheaper way; 0 to stay
    prefill: np.ndarray  # float[split], seconds to prefill the cache of the first moment
    profile_step_s: np.ndarray  # float[split], seconds of the first decode step, uncorrected
    shared: np.ndarray  # float[moments], seconds of `run` that are the same in every split
    drafting: Drafting  # the choice of drafts in each split at the first moment

    @classmethod
    def of(
        cls,
        tables: CostTables,
        latency: LatencyModel,
        forecast: Forecast,
        switch_costs: SwitchCosts,
        memory: MemoryModel | None = None,
        acceptance: Acceptance | None = None,
        limits: DraftLimits = UNLIMITED,
    ) -> "Costs":
        """Returns the costs of `forecast`.

        Args:
          memory: the sizes of the pools; without it pools hold every sequence.
          acceptance: how many draft tokens are accepted; without it there are no drafts.
          limits: most tokens of a draft, and of a draft model's cache.
        """
        pressure = PoolPressure.of(forecast, tables.splits, memory)
        step, drafting = cheapest_steps(tables, pressure, forecast, acceptance, limits)
        fullest, context = np.broadcast_arrays(pressure.rows[0], forecast.mean_context)
        run, shared = _running(tables, latency.correction, forecast, pressure, step)
        migrate = tables.migrations(fullest, pressure.running, forecast.mean_context)
        migrate = migrate * switch_costs.kv("migrate")
        recompute = tables.recomputations(fullest, context) * switch_costs.kv("recompute")
        switch = np.minimum(migrate, recompute[None]) + tables.reshard[:, :, None]
        switch[np.diag_indices(len(switch))] = 0.0
        return cls(
            tables,
            forecast.any_running,
            run,
            migrate,
            recompute,
            np.moveaxis(switch, -1, 0),
            tables.recomputations(forecast.prompts * fullest[:, :1], context[:, :1])[:, 0],
            step[:, 0],
            shared,
            drafting,
        )

    def slower(self, times: np.ndarray) -> "Costs":
        """Returns the costs if steps take `times` as long, float[split]; `shared` stays."""
        return replace(self, run=(self.run - self.shared) * times[:, None] + self.shared)

    def where(self, has_room: np.ndarray, may_switch: np.ndarray) -> "Costs":
        """Returns these costs, with layouts that have no room priced out of every plan.

        Args:
          has_room: bool[split]. A rollout may stay in a layout without room, but not begin in it.
          may_switch: bool[from, to], whether a switch has room.
        """
        switch = np.where(may_switch, self.switch, LARGE_S)
        diagonal = np.arange(len(self.run))
        switch[:, diagonal, diagonal] = 0.0
        return replace(self, switch=switch, prefill=np.where(has_room, self.prefill, LARGE_S))

    def only_way(self, at: int, source: int, target: int) -> OneWay | None:
        """Returns the only measured way to carry the KV cache at moment `at`, or None if both ways
        are measured."""
        if self.migrate[source, target, at] >= LARGE_S:
            return "recompute"
        return "migrate" if self.recompute[target, at] >= LARGE_S else None

    def cheapest(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the expected seconds to the end from each layout, and the best next layout at
        each moment, int[moments, from]."""
        # options[j, a, b]: at moment j go from a to b (or stay), run there, then on the best path.
        options = self.switch * (SAFETY * self.any_running)[:, None, None] + self.run.T[:, None, :]
        after = np.zeros(len(self.run))
        for at in options[::-1]:
            at += after
            after = np.minimum.reduce(at, axis=1)  # `min`, without its detours
        return after, options.argmin(axis=2)

    def seconds(self, start: int, path: np.ndarray) -> float:
        """Returns the expected seconds of `path` from the layout `start`. `path` has the layout at
        each moment, int[moments]."""
        at = np.arange(len(path))
        before = np.concatenate([[start], path[:-1]])
        switches = self.switch[at, before, path] * self.any_running
        return float(self.run[path, at].sum() + SAFETY * switches.sum())


def _running(
    tables: CostTables,
    correction: Correction,
    forecast: Forecast,
    pressure: PoolPressure,
    step: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns `Costs.run` and `Costs.shared` for uncorrected steps of `step` seconds, float[split,
    moment]."""
    factors = np.array([correction.factor(split) for split in tables.splits])
    one = np.ones_like(step)
    again = pressure.again * tables.recomputations(one, forecast.mean_context * one)
    # All sequences have to make all their steps, no matter who waits.
    shared = correction.per_sequence_s * forecast.running * forecast.steps * forecast.any_running
    run = (factors[:, None] * step + again) * pressure.steps * forecast.any_running + shared
    return run, shared


def follow(choices: np.ndarray, start: int) -> np.ndarray:
    """Returns the layout to run in at each moment, int[moments], from `start`. `choices` has the
    best layout at each moment, by the layout before it: int[moments, from]."""
    path = np.empty(len(choices), int)
    for j, choice in enumerate(choices):
        start = path[j] = choice[start]
    return path
