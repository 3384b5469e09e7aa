"""Compares the planner, with drafts and without, to every static layout on the same rollouts.

Knows seconds on a simulated clock. Does not know where a machine's costs are from.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from pat_jax.engine.record.report import RolloutReport
from pat_jax.engine.record.trace import RolloutTrace
from pat_jax.planning.drafts import Acceptance
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import CostModelPlanner, Planner
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.planning.types import Split
from pat_jax.profiling.simulate.draw import Draw
from pat_jax.profiling.simulate.machine import Machine, Workload
from pat_jax.profiling.simulate.response_lengths import ResponseLengths
from pat_jax.profiling.simulate.simulator import replay

ADAPTIVE = "adaptive"
DRAFTING = "adaptive, drafts"


@dataclass(frozen=True)
class System:
    """One way of running the rollouts; each tuple has one entry per rollout."""

    name: str  # ADAPTIVE, DRAFTING, or a layout
    total_s: tuple[float, ...]
    prefill_s: tuple[float, ...]
    decode_s: tuple[float, ...]
    switch_s: tuple[float, ...]  # moves between replicas of a layout included
    num_preempted: tuple[int, ...]
    tokens_per_step: tuple[float, ...]  # tokens of a running sequence in a step: 1 without drafts

    @property
    def mean_s(self) -> float:
        return fmean(self.total_s)


@dataclass(frozen=True)
class Comparison:
    """The adaptive rollouts, and the same rollouts in every static layout."""

    adaptive: System
    static: tuple[System, ...]
    traces: tuple[RolloutTrace, ...]  # of the adaptive rollouts
    tokens: tuple[int, ...]  # of the responses of each rollout
    longest: tuple[int, ...]  # tokens of the longest of them
    drafting: System | None = None  # adaptive with drafts; None: no drafts

    @property
    def systems(self) -> tuple[System, ...]:
        drafting = () if self.drafting is None else (self.drafting,)
        return self.adaptive, *drafting, *self.static

    @property
    def best_static(self) -> System:
        return min(self.static, key=lambda system: system.mean_s)

    def gain(self, system: System) -> float:
        """Returns the share of `system`'s time that adapting saves, negative if it is slower."""
        return 1 - self.adaptive.mean_s / system.mean_s

    @property
    def tail_share(self) -> float:
        """Mean share of an adaptive rollout's steps with at most 64 unfinished sequences."""
        return fmean(1 - ([0] * 65 + [*x.done_after])[-65] / x.total_steps for x in self.traces)

    def to_json(self) -> dict[str, Any]:
        best = self.best_static
        return {
            "systems": [
                asdict(system) | {"mean_s": system.mean_s, "gain": self.gain(system)}
                for system in self.systems
            ],
            "best_static": best.name,
            "gain_over_best_static": self.gain(best),
            "tail_share": self.tail_share,
            "tokens": list(self.tokens),
            "longest": list(self.longest),
            "traces": [asdict(trace) for trace in self.traces],
        }


@dataclass(frozen=True)
class Series:
    """Rollouts that follow one another."""

    draw: Draw  # of all; each has another seed
    rollouts: int = 1

    def workload(self, lengths: ResponseLengths, number: int) -> Workload:
        """Returns the workload of rollout `number`; -1 is the one before, known to the planner."""
        return lengths.draw(replace(self.draw, seed=self.draw.seed + 1 + number))


def compare(machine: Machine, lengths: ResponseLengths, series: Series) -> Comparison:
    """Replays every rollout of a series with the planner, and in every static layout.

    The planner knows the machine's latency model, and has learned the lengths of one earlier
    rollout; it learns from each that ends. If drafts have programs, another planner uses them. It
    begins with `Acceptance.unseen`, whatever the machine's acceptance is.
    """
    planner = _first_planner(machine, lengths, series)
    learned = planner.lengths
    workloads = [series.workload(lengths, number) for number in range(series.rollouts)]
    drafting = None
    if machine.drafts.longest:
        believed = Acceptance.unseen(is_generated=machine.drafts.is_generated)
        one = replace(planner, acceptance=believed, drafts=machine.drafts.limits)
        drafting = _summed(DRAFTING, _learning(workloads, one, machine))
    adaptive = _learning(workloads, planner, machine)
    static: dict[Split, list[RolloutReport]] = {}
    for split in machine.splits:
        fixed: Planner = FixedLayout(split)
        if machine.truth.shift_round(split) < math.inf:  # sequences move to even out its replicas
            fixed = CostModelPlanner((split,), machine.truth, learned, memory=machine.memory)
        static[split] = [replay(workload, fixed, machine) for workload in workloads]
    return Comparison(
        _summed(ADAPTIVE, adaptive),
        tuple(_summed(str(split), done) for split, done in static.items()),
        tuple(done.trace for done in adaptive),
        tuple(int(workload.responses.sum()) for workload in workloads),
        tuple(int(workload.responses.max()) for workload in workloads),
        drafting,
    )


def adaptive_s(machine: Machine, lengths: ResponseLengths, series: Series) -> float:
    """Returns the mean seconds of the adaptive rollouts of `compare` without drafts."""
    planner = _first_planner(machine, lengths, series)
    workloads = [series.workload(lengths, number) for number in range(series.rollouts)]
    return fmean(done.total_s for done in _learning(workloads, planner, machine))


def _first_planner(machine: Machine, lengths: ResponseLengths, series: Series) -> CostModelPlanner:
    """Returns a planner without drafts that has learned from the rollout before the first."""
    learned = _with(LengthModel.empty(series.draw.cap), series.workload(lengths, -1))
    return CostModelPlanner(machine.splits, machine.truth, learned, memory=machine.memory)


def _learning(
    workloads: Sequence[Workload], planner: CostModelPlanner, machine: Machine
) -> list[RolloutReport]:
    done = []
    for workload in workloads:
        done.append(replay(workload, planner, machine))
        planner.observe_rollout(_with(planner.lengths, workload))
    return done


def _with(lengths: LengthModel, workload: Workload) -> LengthModel:
    """Returns `lengths` after the responses of `workload`, whose prompts do not occur again."""
    responses = workload.responses
    return lengths.updated(responses, responses >= workload.cap, workload.prompt_id)


def _summed(name: str, replays: Sequence[RolloutReport]) -> System:
    return System(
        name,
        tuple(done.total_s for done in replays),
        tuple(done.spent("prefill") for done in replays),
        tuple(done.spent("decode") for done in replays),
        tuple(done.spent("switch", "balance") for done in replays),
        tuple(done.preempted for done in replays),
        tuple(done.tokens_per_row_step for done in replays),
    )
