"""Rollouts with drafts on 8xH100, replayed: what drafts and adaptive layouts give together.

    python -m benchmarks.speculation_replay --data ../shared/data \
        --out benchmarks/results/speculation_replay.json

{Llama-3.1-8B, Qwen3-14B} x {128, 512, 2048 responses} x {DeepSeek-R1's lengths (ServeGen), MATH level 5
(zeroeval)}. No rollout ran on a GPU: the planner, the buckets and the rules of the engine are those that ship,
on a simulated clock; steps, those that verify drafts too, are composed from kernel times measured on H100s
(`profiling/predict/composer.py`, which says what is assumed), lengths are real ones drawn anew for each replay.

What drafts are worth is not simulated token by token: every row says in each step what is expected of the room
it has (`profiling/simulate/drafted.py`). Two truths: a row alone that drafts eight tokens from its own text and its
siblings says 2.29 tokens a step (a policy in RL) or 1.92 (QwQ-32B), as counted on real responses of other prompts
and lengths than those replayed; by kind of match it is as `Acceptance.unseen` has it, but for one factor. The
planner believes in that from the first burst on and learns; those that it is compared with know the truth.

    speed-up    time of the best static layout without drafts, chosen afterwards for each replay / time
    regret      time / clairvoyant time - 1

Clairvoyant: the least of a dynamic program over layouts and budgets that knows all lengths and the acceptance
(`profiling/simulate/hindsight.py`; with drafts near what is possible, no bound), of the planner that knows the
acceptance, and of every static layout with every budget, chosen afterwards.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kernel_tables import add_data_option, measured_kernels
from benchmarks.speculation_cells import (
    ADAPTIVE,
    BUDGETED,
    CLAIRVOYANT,
    COUNTED,
    GPU,
    INFORMED,
    PLANNED,
    STATICS,
    Cell,
    grid,
    in_processes,
    run_cell,
)
from benchmarks.workloads import read
from pat_jax.profiling.predict.kernel_files import NoData

GOAL_SPEED_UP, GOAL_REGRET = 1.5, 2.0
SYSTEMS = (ADAPTIVE, PLANNED, INFORMED)
Seconds = Mapping[str, Sequence[float]]


def summary(seconds: Seconds) -> dict[str, Any]:
    """Of some replays, all of one truth: means, and what is worst."""
    known = {name: np.array(values) for name, values in seconds.items()}
    best = np.min([known[name] for name in STATICS], axis=0)
    fixed = np.min([known[name] for name in BUDGETED], axis=0)
    regret = 100 * (known[PLANNED] / known[CLAIRVOYANT] - 1)
    return {
        "speed_up": {name: spread(best / known[name], np.min) for name in SYSTEMS},
        "speed_up_of_the_best_static_with_a_fixed_budget": spread(best / fixed, np.min),
        "speed_up_of_clairvoyant": spread(best / known[CLAIRVOYANT], np.min),
        "planned_over_adaptive": spread(known[ADAPTIVE] / known[PLANNED], np.min),
        "regret_percent": spread(regret, np.max),
        "regret_percent_acceptance_known": spread(
            100 * (known[INFORMED] / known[CLAIRVOYANT] - 1), np.max
        ),
    }


def spread(values: np.ndarray, worst) -> dict[str, float]:
    return {"mean": round(float(values.mean()), 3), "worst": round(float(worst(values)), 3)}


def of_cell(found: Mapping) -> dict[str, Any]:
    """Of one cell and one truth."""
    seconds, planned = found["seconds"], found["planned"]
    names = ("tokens_a_step", "steps_with_drafts", "drafts_verified")
    return {
        "seconds": {name: round(float(np.mean(s)), 2) for name, s in seconds.items()},
        **summary(seconds),
        "planned": {n: round(float(np.mean([one[n] for one in planned])), 3) for n in names},
        "paths": sorted({one["path"] for one in planned}),
    }


def pooled(cells: Iterable[Seconds]) -> Seconds:
    together: dict[str, list[float]] = {}
    for seconds in cells:
        for name, values in seconds.items():
            together.setdefault(name, []).extend(values)
    return together


def print_cells(results: Mapping[Cell, Mapping], truth: str) -> None:
    print(f"\n{truth}: {COUNTED[truth]} tokens a step of a row alone with drafts of eight tokens")
    print(
        f"{'':38}{'best static':>12}{'+ budget':>10}{'adaptive':>10}{'planned':>10}{'clairv.':>10}"
        f"{'speed-up':>10}{'regret':>8}{'tokens/step':>12}"
    )
    for cell, found in results.items():
        one = of_cell(found[truth])
        s, up, regret = one["seconds"], one["speed_up"], one["regret_percent"]
        best, fixed = (min(s[name] for name in names) for names in (STATICS, BUDGETED))
        numbers = (best, fixed, s[ADAPTIVE], s[PLANNED], s[CLAIRVOYANT])
        print(
            f"{cell!s:38}{numbers[0]:12.1f}" + "".join(f"{n:10.1f}" for n in numbers[1:]),
            f"{up[PLANNED]['mean']:9.2f}{regret['mean']:8.1f}{one['planned']['tokens_a_step']:12.2f}",
        )


def measure(args: argparse.Namespace) -> dict[Cell, dict]:
    """Every cell, in as many processes as asked for."""
    cells, results = grid(args.data), {}
    replayed = in_processes(run_cell, cells, args.replays, args.processes)
    for cell, found in zip(cells, replayed, strict=True):
        results[cell] = found
        print(f"{len(results)}/{len(cells)} {cell}", file=sys.stderr)
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
    tables = {
        truth: summary(pooled(found[truth]["seconds"] for found in results.values()))
        for truth in COUNTED
    }
    for truth, table in tables.items():
        print_cells(results, truth)
        print(json.dumps(table, indent=1))
    if args.out:
        content = {
            "command": "python -m benchmarks.speculation_replay " + " ".join(sys.argv[1:]),
            "what": (__doc__ or "").split("\n\n", 2)[2],
            "goals": {"speed_up_mean": GOAL_SPEED_UP, "regret_percent_mean": GOAL_REGRET},
            "replays_per_cell": args.replays,
            "seconds": round(time.time() - started),
            "all_cells": tables,
            "cells": {
                str(cell): {truth: of_cell(found[truth]) for truth in COUNTED}
                for cell, found in results.items()
            },
        }
        args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
