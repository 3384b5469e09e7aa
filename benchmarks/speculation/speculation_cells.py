"""The grid of `speculation_replay`: one rollout under every layout, budget of drafts and planner, in seconds."""

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner.kernel_tables import MODELS, SPLITS, machine_of, measured_kernels
from benchmarks.planner.regret_cells import SIZES
from benchmarks.planner.workloads import LengthData, read
from benchmarks.report import options
from benchmarks.speculation.recorded_drafts import SETS, RecordedDrafts, recorded
from pat_jax.config.speculation import SpeculationConfig
from pat_jax.engine.record.report import RolloutReport
from pat_jax.engine.sizing.draft_choice import ON_ACCELERATORS, TEXTS_ROOM
from pat_jax.layout.buckets import Drafts
from pat_jax.planning.drafts import Acceptance
from pat_jax.planning.planner.planner import CostModelPlanner, Planner
from pat_jax.planning.types import Load, Plan, Split
from pat_jax.profiling.simulate.machine import Machine, Workload
from pat_jax.profiling.simulate.simulator import replay

GPU, LENGTHS = "8xH100", ("r1", "math")
OPTIONS = SpeculationConfig()
DRAFTS = Drafts(OPTIONS.num_draft_tokens, OPTIONS.longest, ON_ACCELERATORS, TEXTS_ROOM)
ADAPTIVE, PLANNED, INFORMED = "adaptive", "planned with drafts", "planned, mean acceptance known"


@dataclass(frozen=True)
class Cell:
    """One point of the grid."""

    model: str
    size: int
    lengths: str
    data: Path

    def __str__(self) -> str:
        return f"{self.model}, {self.size} responses, {self.lengths}"

    @property
    def known(self) -> LengthData:
        return _lengths(self.data)[self.lengths]

    def machine(self, drafts: Drafts = DRAFTS) -> Machine:
        """Drafts are worth nothing known yet."""
        return machine_of(
            measured_kernels(self.data, GPU),
            self.model,
            self.size,
            (self.known.max_prompt, self.known.cap),
            drafts=drafts,
            acceptance=Acceptance.unseen(),
        )


def replay_options(doc: str | None) -> argparse.ArgumentParser:
    parser = options(doc, has_data=True)
    parser.add_argument("--replays", type=int, default=4, help="of each cell")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=SIZES, help="of rollouts, responses"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    return parser


def grid(args: argparse.Namespace) -> list[Cell]:
    """The cells that were asked for."""
    return [Cell(m, n, name, args.data) for name in LENGTHS for m in MODELS for n in args.sizes]


@cache
def _lengths(data: Path) -> dict[str, LengthData]:
    return read(data)


@dataclass
class PinnedDraftTokens(CostModelPlanner):
    """One layout and one budget for good; where it has no program, the next smaller one that has, or the
    smallest."""

    machine: Machine | None = None
    num_draft_tokens: int = 0

    def decide(self, load: Load, current: Split, options: Sequence[np.ndarray] = ()) -> Plan:
        plan, machine = super().decide(load, current, options), self.machine
        assert machine is not None and self.acceptance is not None
        rows = machine.buckets.rows_for(current, int(np.bincount(load.replica).max()))
        having = machine.drafts.of(rows)
        if not having:
            return plan
        num_draft_tokens = max(
            (n for n in having if n <= self.num_draft_tokens), default=min(having)
        )
        return replace(
            plan, num_draft_tokens=num_draft_tokens, accept_prob=self.acceptance.accept_prob
        )


def undrafted(cell: Cell, machine: Machine) -> Iterator[tuple[str, Planner]]:
    truth, lengths = machine.truth, cell.known.fitted()
    for split in SPLITS:
        yield static(split), CostModelPlanner((split,), truth, lengths)
    yield ADAPTIVE, CostModelPlanner(SPLITS, truth, lengths)


def static(split: Split, num_draft_tokens: int = 0) -> str:
    return f"static tp{split.tp}" + (f", budget {num_draft_tokens}" if num_draft_tokens else "")


def one_number(num_draft_tokens: int) -> str:
    return f"planned, budget {num_draft_tokens}"


STATICS = [static(split) for split in SPLITS]
BUDGETED = [
    static(split, num_draft_tokens)
    for split in SPLITS
    for num_draft_tokens in DRAFTS.num_draft_tokens
]
ONE_NUMBER = [one_number(num_draft_tokens) for num_draft_tokens in DRAFTS.num_draft_tokens]


def drafting(cell: Cell, machine: Machine) -> Iterator[tuple[str, Planner]]:
    """Those that know what drafts are worth in the mean, and one that learns it from the first burst on."""
    known: dict[str, Any] = {"latency": machine.truth, "lengths": cell.known.fitted()}
    assert machine.acceptance is not None
    known |= {"acceptance": machine.acceptance, "drafts": machine.drafts.limits}
    for split in SPLITS:
        for num_draft_tokens in machine.drafts.num_draft_tokens:
            fixed = PinnedDraftTokens(
                (split,), **known, machine=machine, num_draft_tokens=num_draft_tokens
            )
            yield static(split, num_draft_tokens), fixed
    informed = CostModelPlanner(SPLITS, **known)
    yield INFORMED, informed
    yield PLANNED, replace(informed, acceptance=Acceptance.unseen())


def truths(cell: Cell) -> dict[str, RecordedDrafts]:
    """What drafts are worth, by whose responses were recorded."""
    return {name: recorded(cell.data, name, DRAFTS.longest) for name in SETS}


def run_cell(cell: Cell, replays: int) -> dict[str, dict]:
    """Of each truth of acceptance: seconds of every system in every replay, and what the planned one did."""
    found: dict[str, dict] = {name: {"seconds": {}, "planned": []} for name in SETS}
    for seed in range(replays):
        for truth, (workload, runs) in replayed(cell, seed).items():
            for name, run in runs.items():
                found[truth]["seconds"].setdefault(name, []).append(run.total_s)
            found[truth]["planned"].append(_did(workload, runs[PLANNED]))
    return found


def replayed(cell: Cell, seed: int) -> dict[str, tuple[Workload, dict[str, RolloutReport]]]:
    """One rollout under every system, of each truth of acceptance."""
    bare, found = cell.machine(), {}
    alone = {
        n: cell.machine(replace(DRAFTS, num_draft_tokens=(n,))) for n in DRAFTS.num_draft_tokens
    }
    alike = cell.known.sample(cell.size, seed)
    plain = {name: replay(alike, x, bare) for name, x in undrafted(cell, bare)}
    for truth, drafts in truths(cell).items():
        machine, workload = replace(bare, acceptance=drafts.pooled), drafts.draw(alike, seed)
        systems = dict(drafting(cell, machine))
        runs = plain | {name: replay(workload, x, machine) for name, x in systems.items()}
        for num_draft_tokens, other in alone.items():
            one = replace(other, acceptance=drafts.pooled)
            planner = dict(drafting(cell, one))[PLANNED]
            runs[one_number(num_draft_tokens)] = replay(workload, planner, one)
        found[truth] = workload, runs
    return found


def _did(workload: Workload, run: RolloutReport) -> dict[str, float | str]:
    drafted = [burst.steps for burst in run.bursts if burst.num_draft_tokens]
    return {
        "tokens_a_step": run.tokens_per_row_step,
        "steps_with_drafts": sum(drafted) / run.decode_steps,
        "drafts_verified": run.drafted / int(workload.responses.sum()),
        "path": " > ".join(run.trace.path),
    }
