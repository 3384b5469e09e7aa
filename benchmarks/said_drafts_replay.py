"""Rollouts whose drafts a model says, on 8xH100, replayed: from which acceptance on they pay.

    python -m benchmarks.said_drafts_replay --data ../shared/data \
        --out benchmarks/results/said_drafts_replay.json

{Qwen3-8B, 14B, 32B} x {128, 512 responses} x {DeepSeek-R1's lengths (ServeGen), MATH level 5 (zeroeval)}; drafts are
said by Qwen3-0.6B, or by the first quarter of the policy's own layers. No rollout ran on a GPU: planner, buckets and
rules of the engine are those that ship, on a simulated clock; steps are composed from kernel times measured on H100s,
those that verify drafts with a pass of whoever says them for each token of the budget
(`profiling/predict/composer.py`, which says what is assumed).

The acceptance is assumed: a token of a draft is right with the same probability wherever those before it are.
Nobody has counted here how often Qwen3-0.6B or a trained exit head is right. Beside it: no drafts, and drafts copied from
a response's own text and its siblings, as often right as the built-in table has it.

All run in the layouts that have room for all prompts beside the training state, with whatever says the drafts and
without it; where there is none, that source is not replayed.

Planners learn what drafts are worth from the first burst on; every replay begins anew. Beside each is one that knows it
from the beginning. A draft model's cache has pages for --speculation.cache_tokens, as many as that has by itself. What
it computes to catch up with its policy, behind a stretch without drafts or a switch, is added to its time; the planner does not predict it.

    speed-up    time of the best static layout without drafts, chosen afterwards for each replay / time
    predicted   tokens of a row in a step with drafts that the planner expected / those that it said
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kernel_tables import GPUS, SPLITS, add_data_option, measured_kernels
from benchmarks.regret_cells import Pinned
from benchmarks.speculation_cells import ADAPTIVE, GPU, LENGTHS, Rollouts, in_processes, static
from benchmarks.speculation_replay import Seconds
from benchmarks.workloads import read
from pat_jax.config.rollout import RolloutConfig
from pat_jax.config.run import AlgorithmConfig, RunConfig
from pat_jax.config.speculation import EXIT, MODEL, SpeculationConfig
from pat_jax.engine.draft_choice import drafts_of
from pat_jax.engine.layout.buckets import Buckets
from pat_jax.engine.report import RolloutReport
from pat_jax.models.config import ModelConfig
from pat_jax.models.presets import preset
from pat_jax.planning.drafts import Acceptance
from pat_jax.planning.planner.planner import CostModelPlanner, Planner
from pat_jax.planning.types import Ran, Split
from pat_jax.profiling.cross_compile.by_arithmetic import needs_of
from pat_jax.profiling.cross_compile.plant import Order
from pat_jax.profiling.predict.composer import Composer
from pat_jax.profiling.predict.kernel_files import NoData
from pat_jax.profiling.predict.targets import Target
from pat_jax.profiling.simulate.draft_sources import said
from pat_jax.profiling.simulate.machine import Machine, Workload
from pat_jax.profiling.simulate.simulator import replay

ASKED, SIZES = "qwen3-0.6b", (128, 512)
POLICIES = {name: preset(name) for name in ("qwen3-8b", "qwen3-14b")}
POLICIES["Qwen3-32B"] = replace(POLICIES["qwen3-14b"], mlp_dim=25_600, num_layers=64, num_heads=64)
COPIED, FIRST_LAYERS, DRAFT_MODEL = "suffix", "first quarter of the layers", ASKED
SAID = (FIRST_LAYERS, DRAFT_MODEL)
BEST = "the best static layout"
ACCEPTANCES = (0.1, 0.5, 0.6, 0.7, 0.8)
SAMPLES = 8  # of a prompt
ALONE = Split(1, 1)  # what a device does, which has all of a draft model


def name_of(source: str, acceptance: float, *, is_known: bool = False) -> str:
    return f"{source}, {acceptance}" + ", known" * is_known


SYSTEMS = (
    ADAPTIVE,
    COPIED,
    *(name_of(x, y, is_known=z) for x in SAID for y in ACCEPTANCES for z in (False, True)),
)


class Cell(Rollouts):
    """One point of the grid."""

    @property
    def policy(self) -> ModelConfig:
        return POLICIES[self.model]

    @property
    def config(self) -> RolloutConfig:
        return replace(
            RolloutConfig(),
            prompts_per_step=self.size // SAMPLES,
            num_generations=SAMPLES,
            max_prompt_length=self.known.max_prompt,
            max_completion_length=self.known.cap,
            min_rows=1,
            min_length=512,
        )

    @property
    def draft_model(self) -> Composer:
        return Composer(measured_kernels(self.data, GPU), preset(ASKED))

    def speculation(self, source: str) -> SpeculationConfig:
        if source == FIRST_LAYERS:
            return SpeculationConfig(f"{EXIT}{self.policy.num_layers // 4}")
        return SpeculationConfig(source if source == COPIED else MODEL + ASKED)

    def machine(self, source: str) -> Machine | None:
        """In the layouts with room there, drafts or not; None: there is none. Drafts are worth nothing known yet."""
        without = SpeculationConfig("none")
        asked_for = self.speculation(source) if source else without
        both = [_roomy(self.policy, self.config, x) for x in (without, asked_for)]
        splits, drafts = (
            [split for split in both[0] if split in both[1]],
            drafts_of(asked_for, "cuda"),
        )
        if not splits:
            return None
        composer = Composer(measured_kernels(self.data, GPU), self.policy)
        asked = self.draft_model if drafts.has_model else None
        buckets = Buckets.of(splits, self.size, self.config)
        latency = composer.latency_model(buckets, drafts, asked)
        return Machine.of(
            latency,
            splits,
            self.config,
            capacity=self.size,
            runs_ahead=True,
            drafts=drafts,
            acceptance=Acceptance.unseen(is_said=drafts.is_said),
        )


@cache
def _roomy(
    policy: ModelConfig, config: RolloutConfig, speculation: SpeculationConfig
) -> tuple[Split, ...]:
    """Layouts with room for all prompts beside the training state."""
    learning = AlgorithmConfig(mini_batch_size=config.prompts_per_step)
    run = RunConfig(
        compute_dtype="bfloat16", rollout=config, algorithm=learning, speculation=speculation
    )
    draft_model = preset(ASKED) if speculation.draft_model else None
    order = Order.of(Target.parse(GPUS[GPU]), run, policy, (0,), draft_model)
    needs, count = needs_of(order), config.prompts_per_step * config.num_generations
    least = {
        split: max(needs.held(split), needs.starting(split, count, config.max_prompt_length))
        for split in SPLITS
    }
    return tuple(split for split in SPLITS if least[split] <= needs.usable)


def run_cell(cell: Cell, replays: int) -> dict[str, Any]:
    """Seconds of every system that has room, in every replay, and what those with drafts did."""
    lengths = cell.known.fitted()
    bare = cell.machine("")
    assert bare is not None, "a cell without drafts"
    machines = {source: cell.machine(source) for source in (COPIED, *SAID)}
    found: dict[str, Any] = {"seconds": {}, "did": {}}
    for seed in range(replays):
        workload = cell.known.sample(cell.size, seed)
        plain: dict[str, Planner] = {
            static(split): Pinned((split,), bare.truth, lengths) for split in bare.splits
        }
        plain[ADAPTIVE] = CostModelPlanner(bare.splits, bare.truth, lengths)
        took = {name: replay(workload, planner, bare).total_s for name, planner in plain.items()}
        took[BEST] = min(seconds for name, seconds in took.items() if name != ADAPTIVE)
        for name, seconds in took.items():
            _note(found["seconds"], name, seconds)
        for name, source, truth, believed in drafting():
            machine = machines[source]
            if machine is None:
                continue
            machine = replace(machine, acceptance=truth)
            drafts: dict[str, Any] = {"acceptance": believed}
            drafts["drafts"] = machine.drafts.limits
            done = replay(
                workload,
                CostModelPlanner(machine.splits, machine.truth, lengths, **drafts),
                machine,
            )
            is_asked = machine.drafts.has_model
            behind_s = catching_up_s(done.bursts, cell.draft_model) if is_asked else 0.0
            _note(found["seconds"], name, done.total_s + behind_s)
            _note(found["did"], name, _did(workload, done, behind_s))
    return found


def drafting() -> Iterable[tuple[str, str, Acceptance, Acceptance]]:
    """Name, source, what drafts are really worth, and what the planner believes at first."""
    yield COPIED, COPIED, Acceptance.unseen(), Acceptance.unseen()
    for source in SAID:
        for right in ACCEPTANCES:
            truth = said(right)
            yield name_of(source, right), source, truth, Acceptance.unseen(is_said=True)
            yield name_of(source, right, is_known=True), source, truth, truth


def _note(where: dict[str, list], name: str, value: Any) -> None:
    where.setdefault(name, []).append(value)


def catching_up_s(bursts: Sequence[Ran], draft_model: Composer) -> float:
    """Seconds in which a draft model computes what bursts without drafts, and switches, have left out of its cache:
    of the group that has most, in whole calls."""
    call, split, behind, seconds = draft_model.prefill_blocks * draft_model.page_size, None, 0, 0.0
    for burst in bursts:
        if not burst.budget:
            behind += burst.steps * burst.rows
            continue
        lacking = burst.held if burst.split != split else min(behind, burst.held)
        calls = math.ceil(lacking / call)
        seconds += calls * draft_model.prefill_call(ALONE, burst.length)
        split, behind = burst.split, 0
    return seconds


def _did(workload: Workload, done: RolloutReport, behind_s: float) -> dict[str, float | str]:
    sums = done.drafts
    return {
        "tokens_a_step": done.tokens_per_row_step,
        "steps_with_drafts": sums.steps / done.decode_steps,
        "drafts_verified": done.drafted / int(workload.responses.sum()),
        "predicted": sums.expected_tokens / sums.tokens if sums.steps else 1.0,
        "catching_up_s": behind_s,
        "path": " > ".join(done.trace.path),
    }


def summary(cells: Sequence[Seconds]) -> dict[str, Any]:
    """Of the replays of some cells: how many times as fast as others each system is where it has room, in the
    mean and at worst."""

    def ratios(other: str, name: str) -> np.ndarray:
        having = [one for one in cells if name in one]
        return np.concatenate([np.divide(one[other], one[name]) for one in having])

    names = [name for name in SYSTEMS if any(name in one for one in cells)]
    return {
        f"speed_up_over_{other}": {name: spread(ratios(other, name), np.min) for name in names}
        for other in (BEST, ADAPTIVE, COPIED)
    }


def spread(values: np.ndarray, worst) -> dict[str, float]:
    return {"mean": round(float(values.mean()), 3), "worst": round(float(worst(values)), 3)}


def of_cell(found: Mapping[str, Any]) -> dict[str, Any]:
    def mean(values: Sequence[float]) -> float:
        return round(float(np.mean(values)), 3)

    did = {
        name: {x: mean([one[x] for one in each]) for x in each[0] if x != "path"}
        | {"paths": sorted({one["path"] for one in each})}
        for name, each in found["did"].items()
    }
    return {
        "seconds": {name: mean(s) for name, s in found["seconds"].items()},
        **summary([found["seconds"]]),
        "did": did,
    }


def print_cell(cell: Cell, found: Mapping[str, Any]) -> None:
    one = of_cell(found)
    print(f"\n{cell}: {one['seconds'][BEST]:.1f} s in the best static layout")
    print(f"{'':40}{'seconds':>9}{'speed-up':>9}{'tokens':>8}{'drafted':>9}{'predicted':>11}")
    for name in (x for x in SYSTEMS if x in one["seconds"]):
        up, did = one[f"speed_up_over_{BEST}"][name]["mean"], one["did"].get(name)
        line = f"{name:40}{one['seconds'][name]:9.1f}{up:9.2f}"
        if did:
            line += f"{did['tokens_a_step']:8.2f}{did['steps_with_drafts']:9.0%}{did['predicted']:11.3f}"
        print(line)


def measure(args: argparse.Namespace) -> dict[Cell, dict]:
    """Every cell, in as many processes as asked for."""
    cells = [Cell(m, n, name, args.data) for m in POLICIES for name in LENGTHS for n in SIZES]
    results = {}
    replayed = in_processes(run_cell, cells, args.replays, args.processes)
    for cell, found in zip(cells, replayed, strict=True):
        results[cell] = found
        print_cell(cell, found)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_data_option(parser)
    parser.add_argument("--replays", type=int, default=4, help="of each cell")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    started = time.time()
    try:
        measured_kernels(args.data, GPU)
        read(args.data)
    except NoData as error:
        sys.exit(str(error))
    results = measure(args)
    table = summary([found["seconds"] for found in results.values()])
    print(json.dumps(table, indent=1))
    if args.out:
        content = {
            "command": "python -m benchmarks.said_drafts_replay " + " ".join(sys.argv[1:]),
            "what": (__doc__ or "").split("\n\n", 2)[2],
            "replays_per_cell": args.replays,
            "seconds": round(time.time() - started),
            "all_cells": table,
            "cells": {str(cell): of_cell(found) for cell, found in results.items()},
        }
        args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
