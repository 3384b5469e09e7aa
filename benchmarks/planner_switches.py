"""How often the planner switches in the replays of `planner_regret`, and what they take, right beliefs.

    python -m benchmarks.planner_switches --data ../shared/data \
        --out benchmarks/results/planner_switches.json

The grid and the rollouts are those of `planner_regret`: computed, nothing ran on a GPU. Seconds are held
against the clairvoyant plans and the planner of a file of its results, cell by cell, in the mean.
"""

import argparse
import json
import sys
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.kernel_tables import GPUS, MODELS, add_data_option
from benchmarks.regret_cells import NO_TAIL, SIZES, TAILED, Cell, shipped
from benchmarks.workloads import read
from pat_jax.profiling.predict.composer import SWITCH_S
from pat_jax.profiling.predict.kernel_files import NoData

HELD = Path("benchmarks/results/planner_regret_before.json")


def measure(cell: Cell, num_replays: int, held: dict[str, float]) -> dict[str, Any]:
    done = shipped(cell, num_replays)
    seconds = fmean(one.total_s for one in done)
    return {
        "size": cell.size,
        "has_tail": cell.lengths != NO_TAIL,
        "seconds": round(seconds, 2),
        "percent_behind": round(100 * (seconds / held["clairvoyant"] - 1), 2),
        "percent_behind_before": round(100 * (held["right"] / held["clairvoyant"] - 1), 2),
        "switches": [len(one.switches) for one in done],
        "moves": [len(one.balanced) for one in done],
    }


def summary(cells: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By size, and whether lengths have a tail."""
    found = {}
    for size, has_tail in product(SIZES, (True, False)):
        of_size = [c for c in cells.values() if (c["size"], c["has_tail"]) == (size, has_tail)]
        if of_size:
            found[f"{size} sequences, {'with' if has_tail else 'without'} a tail"] = {
                "percent_behind": round(fmean(c["percent_behind"] for c in of_size), 2),
                "percent_behind_before": round(
                    fmean(c["percent_behind_before"] for c in of_size), 2
                ),
                "worst_cell": max(c["percent_behind"] for c in of_size),
                "worst_cell_before": max(c["percent_behind_before"] for c in of_size),
                "most_switches": max(max(c["switches"]) for c in of_size),
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_data_option(parser)
    parser.add_argument("--held", type=Path, default=HELD, help="results of planner_regret")
    parser.add_argument("--sizes", nargs="+", type=int, choices=SIZES, default=list(SIZES))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    try:
        read(args.data)
    except NoData as error:
        sys.exit(str(error))
    held = json.loads(args.held.read_text())
    cells = {}
    for size, gpu, model, lengths in product(args.sizes, GPUS, MODELS, (*TAILED, NO_TAIL)):
        name = f"{model} on {gpu}, {size} sequences, {lengths}"
        cell = Cell(gpu, model, size, lengths, args.data, SWITCH_S)
        cells[name] = measure(cell, held["replays_per_cell"], held["cells"][name]["seconds"])
        print(f"{name}: {cells[name]}", file=sys.stderr)
    for name, values in summary(cells).items():
        print(f"{name}: {values}")
    if args.out:
        command = "python -m benchmarks.planner_switches " + " ".join(sys.argv[1:])
        content = {"command": command, "summary": summary(cells), "cells": cells}
        args.out.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
