"""The same rollouts under the planner and in every layout for good, one after the other.

Knows seconds on a simulated clock. Does not know where a machine's costs are from.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Self

import numpy as np

from pat_jax.engine.trace import RolloutTrace
from pat_jax.planning.lengths import LengthModel
from pat_jax.planning.planner import CostModelPlanner, Planner
from pat_jax.planning.scripts import FixedLayout
from pat_jax.planning.types import Split
from pat_jax.profiling.machine import Burst, Machine, Replay, Workload
from pat_jax.profiling.response_lengths import Draw, ResponseLengths
from pat_jax.profiling.simulator import replay

ADAPTIVE = "adaptive"
PARTS = ("fixed", "rows", "context", "host")  # of a decode step; see `StepParts`


@dataclass(frozen=True)
class StepParts:
    """Seconds of decoding, by what they grow with.

    As the step model divides them (`planning/step_model.py`), scaled so that they add up.
    """

    fixed: float = 0.0  # weights read once, launches, the latency of collectives
    rows: float = 0.0  # matrix products and sampling of each live row, the bytes of collectives
    context: float = 0.0  # the KV cache of each live token
    host: float = 0.0  # see Machine.host_s_per_sequence

    @property
    def total_s(self) -> float:
        return self.fixed + self.rows + self.context + self.host


@dataclass(frozen=True)
class System:
    """One way of running the rollouts; each tuple has one entry for each of them."""

    name: str  # ADAPTIVE, or a layout
    total_s: tuple[float, ...]
    prefill_s: tuple[float, ...]
    decode_s: tuple[float, ...]
    switch_s: tuple[float, ...]  # moves between groups of a layout included
    num_preempted: tuple[int, ...]
    parts: StepParts  # of all rollouts together

    @property
    def mean_s(self) -> float:
        return fmean(self.total_s)


@dataclass(frozen=True)
class Comparison:
    """What adapting gains over every layout."""

    adaptive: System
    static: tuple[System, ...]
    traces: tuple[RolloutTrace, ...]  # of the adaptive rollouts
    tokens: tuple[int, ...]  # of the responses of each rollout

    @property
    def best_static(self) -> System:
        return min(self.static, key=lambda system: system.mean_s)

    def gain(self, system: System) -> float:
        """Share of `system`'s time that adapting saves; negative where it loses."""
        return 1 - self.adaptive.mean_s / system.mean_s

    @property
    def worst_gain(self) -> float:
        """Over the best static layout of each rollout, in the worst of them."""
        best = np.min([system.total_s for system in self.static], axis=0)
        return float((1 - np.array(self.adaptive.total_s) / best).min())

    @property
    def share_after_switch(self) -> float:
        """Of the adaptive rollouts' time, what comes after the first switch."""
        after = [t.total_s - t.switches[0].at_s for t in self.traces if t.switches]
        return sum(after) / sum(self.adaptive.total_s)

    def to_json(self) -> dict[str, Any]:
        best = self.best_static
        return {
            "systems": [
                asdict(system) | {"mean_s": system.mean_s, "gain": self.gain(system)}
                for system in (self.adaptive, *self.static)
            ],
            "best_static": best.name,
            "gain_over_best_static": self.gain(best),
            "worst_gain": self.worst_gain,
            "share_after_switch": self.share_after_switch,
            "tokens": list(self.tokens),
            "traces": [asdict(trace) for trace in self.traces],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        adaptive, *static = (_system(fields) for fields in data["systems"])
        traces = tuple(RolloutTrace.from_fields(fields) for fields in data["traces"])
        return cls(adaptive, tuple(static), traces, tuple(data["tokens"]))


def _system(fields: dict[str, Any]) -> System:
    known = {name: fields[name] for name in System.__dataclass_fields__}
    lists = {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
    return System(**known | lists | {"parts": StepParts(**fields["parts"])})


@dataclass(frozen=True)
class Series:
    """Rollouts that follow one another."""

    draw: Draw  # of the first
    rollouts: int = 1
    growth: float = 0.0  # by which the logarithm of lengths grows from one to the next

    def workload(self, lengths: ResponseLengths, number: int) -> Workload:
        """Of the rollout of that number; -1 is the one before, which the planner has seen."""
        return lengths.draw(self.draw.later(number, self.growth))


def compare(machine: Machine, lengths: ResponseLengths, series: Series) -> Comparison:
    """Replays every rollout of a series.

    The planner knows the machine's latency model and has seen one rollout, the one before the
    first; it learns from each that ends.
    """
    seen = series.workload(lengths, -1)
    learned = _with(LengthModel.empty(series.draw.cap), seen)
    planner = CostModelPlanner(machine.splits, machine.truth, learned, memory=machine.memory)
    workloads = [series.workload(lengths, number) for number in range(series.rollouts)]
    adaptive = []
    for workload in workloads:
        adaptive.append(replay(workload, planner, machine))
        planner.lengths = _with(planner.lengths, workload)
    return Comparison(
        _summed(ADAPTIVE, adaptive, machine),
        tuple(_static(split, workloads, machine, learned) for split in machine.splits),
        tuple(done.trace for done in adaptive),
        tuple(int(workload.responses.sum()) for workload in workloads),
    )


def _with(lengths: LengthModel, workload: Workload) -> LengthModel:
    """Prompts of another rollout are others: only how alike samples are is learned from them."""
    responses = workload.responses
    return lengths.updated(responses, responses >= workload.cap, workload.prompt_id)


def _static(
    split: Split, workloads: Sequence[Workload], machine: Machine, learned: LengthModel
) -> System:
    """In one layout throughout; its groups are kept even where that was measured, as in training."""
    planner: Planner = FixedLayout(split)
    if machine.truth.shift_round(split) < math.inf:
        planner = CostModelPlanner((split,), machine.truth, learned, memory=machine.memory)
    return _summed(
        str(split), [replay(workload, planner, machine) for workload in workloads], machine
    )


def _summed(name: str, replays: Sequence[Replay], machine: Machine) -> System:
    bursts = [burst for done in replays for burst in done.bursts]
    return System(
        name,
        tuple(done.total_s for done in replays),
        tuple(done.prefill_s for done in replays),
        tuple(done.decode_s for done in replays),
        tuple(done.switch_s + done.balance_s for done in replays),
        tuple(done.num_preempted for done in replays),
        step_parts(bursts, machine),
    )


def step_parts(bursts: Sequence[Burst], machine: Machine) -> StepParts:
    """Where the time of `bursts` goes."""
    totals = np.zeros(len(PARTS))
    for burst in bursts:
        physics = machine.truth.decode[burst.split].physics
        parts = np.array(
            [
                physics.fixed,
                physics.per_row * burst.rows,
                physics.per_token * burst.rows * burst.length,
            ]
        )
        host = machine.host_s_per_sequence * burst.live * burst.steps
        totals[:3] += parts / parts.sum() * (burst.seconds - host)
        totals[3] += host
    return StepParts(*totals.tolist())
