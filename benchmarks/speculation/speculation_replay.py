"""Rollouts with drafts on 8xH100, replayed: what drafts and adaptive layouts give together.

    python -m benchmarks.speculation.speculation_replay --data ../shared/data \
        --out benchmarks/results/speculation_replay.json

{Llama-3.1-8B, Qwen3-14B} x {128, 512, 2048 responses} x {DeepSeek-R1's lengths (ServeGen), MATH level
5 (zeroeval)}. No rollout ran on a GPU: planner, buckets and rules of the engine are those that ship, on
a simulated clock. Steps, those that verify drafts too, are composed from kernel times measured on H100s
(`profiling/predict/composer.py` has what is assumed). Lengths are real, drawn anew for each replay.

Drafts are not simulated token by token: every row gets in each step what is expected of it
(`profiling/simulate/drafted.py`) by an acceptance of its own. Each sequence has that of a recorded
response of the same rank in length (`recorded_drafts.py`). Two truths, by whose responses these are: a
policy in RL, and QwQ-32B. The planner believes in one acceptance of all sequences: first in what is
built in, then in what it learns. Those that it is compared with know the mean of the truth.

    speed-up    time of the best static layout without drafts, chosen afterwards for each replay / time

Beside it is the same planner with programs for one number of draft tokens alone. There is no
oracle plan: `benchmarks/planner/oracle.py` knows nothing of drafts.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.report import in_processes, write
from benchmarks.speculation.recorded_drafts import SETS
from benchmarks.speculation.speculation_cells import (
    ADAPTIVE,
    BUDGETED,
    INFORMED,
    ONE_NUMBER,
    PLANNED,
    STATICS,
    Cell,
    grid,
    replay_options,
    run_cell,
)

SYSTEMS = (ADAPTIVE, PLANNED, INFORMED)
Seconds = Mapping[str, Sequence[float]]


def summary(seconds: Seconds) -> dict[str, Any]:
    """Of some replays: how the ratios of their seconds are distributed."""
    known = {name: np.array(values) for name, values in seconds.items()}

    def best(names: Sequence[str]) -> np.ndarray:
        return np.min([known[name] for name in names], axis=0)

    static, planned = best(STATICS), known[PLANNED]
    return {
        "speed_up": {name: distribution(static / known[name]) for name in SYSTEMS},
        "speed_up_of_the_best_static_with_a_fixed_budget": distribution(static / best(BUDGETED)),
        "planned_over_adaptive": distribution(known[ADAPTIVE] / planned),
        "planned_over_the_best_static_with_a_fixed_budget": distribution(best(BUDGETED) / planned),
        "planned_over_the_best_one_budget": distribution(best(ONE_NUMBER) / planned),
    }


def distribution(values: np.ndarray) -> dict[str, float]:
    names = ("min", "lower_quartile", "median", "upper_quartile", "max")
    marks = np.percentile(values, (0, 25, 50, 75, 100)).round(3).tolist()
    return {"mean": round(float(values.mean()), 3), **dict(zip(names, marks, strict=True))}


def by_size(results: Mapping[Cell, Mapping], truth: str) -> dict[str, Any]:
    """Of all models together."""
    found: dict[str, list[Seconds]] = {}
    for cell, of_truths in results.items():
        found.setdefault(f"{cell.size} responses, {cell.lengths}", []).append(
            of_truths[truth]["seconds"]
        )
    return {name: summary(pooled(some)) for name, some in found.items()}


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


def main() -> None:
    args = replay_options(__doc__).parse_args()
    started = time.time()
    cells = grid(args)
    results = dict(in_processes(run_cell, cells, args.replays, processes=args.processes))
    tables = {
        truth: summary(pooled(found[truth]["seconds"] for found in results.values()))
        for truth in SETS
    }
    sizes = {truth: by_size(results, truth) for truth in SETS}
    for truth, table in tables.items():
        for name, one in [("all", table), *sizes[truth].items()]:
            print(f"{truth}, {name}: {json.dumps(one['speed_up'][PLANNED])}")
    write(
        args.out,
        {
            "what": (__doc__ or "").split("\n\n", 2)[2],
            "replays_per_cell": args.replays,
            "seconds": round(time.time() - started),
            "all_cells": tables,
            "by_size": sizes,
            "cells": {
                str(cell): {truth: of_cell(found[truth]) for truth in SETS}
                for cell, found in results.items()
            },
        },
    )


if __name__ == "__main__":
    main()
