"""What adapting gains over the best static layout, on every set of lengths and with both kinds of sums.

    python -m benchmarks.planner.rollout_gains --data ../shared/data \
        --out benchmarks/results/rollout_gains.json

{Llama-3.1-8B, Qwen3-14B} on 8xH100 x {128, 512, 2048 responses} x every file of `lengths/` that has
the length of each response x sums over devices by a serving engine's one-shot kernel (SGLang's) or by
NCCL, both in a CUDA graph. The planner's length model has learned from the other half of each set. No
rollout ran on a GPU: steps are composed from kernel times (`profiling/predict/composer.py`).

    gain     1 - time / time of the best static layout, chosen afterwards for each rollout
    tail     share of the steps of the adaptive rollout in which at most 64 responses are unfinished
"""

import argparse
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import product
from statistics import fmean
from typing import Any

from benchmarks.planner.kernel_tables import MODELS, SPLITS
from benchmarks.planner.regret_cells import SIZES, Cell, right
from benchmarks.planner.workloads import read
from benchmarks.report import in_processes, options, write
from pat_jax.engine.record.trace import RolloutTrace
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.profiling.predict.composer import SWITCH_S
from pat_jax.profiling.predict.links import Sums
from pat_jax.profiling.simulate.simulator import replay

GPU = "8xH100"
TAIL = 64  # responses
SUMS: tuple[Sums, ...] = ("one-shot", "nccl")
THIN = (0.75, 0.4, 0.1, 0.0)  # least shares of the tail, for the groups of a summary
Rollouts = list[dict[str, Any]]


def run_cell(cell: Cell, replays: int) -> Rollouts:
    """Gain and tail of each rollout, and the seconds behind them."""
    machine = cell.machine()
    believed = right(cell, machine.truth, 0)
    rollouts = []
    for seed in range(replays):
        workload = cell.rollouts(seed)[0]
        done = replay(workload, CostModelPlanner(SPLITS, *believed), machine)
        static = {
            str(split): replay(workload, CostModelPlanner((split,), *believed), machine).total_s
            for split in SPLITS
        }
        gain = 1 - done.total_s / min(static.values())
        seconds = {"adaptive": done.total_s, **static}
        rollouts.append({"gain": gain, "tail": tail(done.trace), "seconds": seconds})
    return rollouts


def tail(trace: RolloutTrace) -> float:
    more = trace.done_after[-1 - TAIL] if len(trace.done_after) > TAIL else 0
    return 1 - more / trace.total_steps


def of_all(rollouts: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Percent: the mean gain, the least and the most, and the mean share of the tail."""
    some = list(rollouts)
    gains = [100 * one["gain"] for one in some]
    found = {"mean": fmean(gains), "least": min(gains), "most": max(gains)}
    found["tail"] = 100 * fmean(one["tail"] for one in some)
    return {name: round(value, 2) for name, value in found.items()}


def summary(results: Sequence[tuple[Cell, Rollouts]]) -> dict[str, Any]:
    """Of the cells of one kind of sums; each cell has as many rollouts."""
    groups: defaultdict[str, Rollouts] = defaultdict(list)
    for cell, rollouts in results:
        tail = fmean(one["tail"] for one in rollouts)
        share = next(least for least in THIN if tail >= least)
        names = ("all", f"{cell.size} responses", f"{cell.lengths}, {cell.size} responses")
        for name in (
            *names,
            f"tail from {100 * share:.0f} % of the steps on, {cell.size} responses",
        ):
            groups[name] += rollouts
    return {name: of_all(groups[name]) for name in sorted(groups)}


def main() -> None:
    parser = options(__doc__, has_data=True)
    parser.add_argument("--replays", type=int, default=8, help="of each cell")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="responses")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    args = parser.parse_args()
    names = list(read(args.data))
    cells = [
        Cell(GPU, model, size, lengths, args.data, SWITCH_S, sums=sums)
        for sums in SUMS
        for model, lengths in product(MODELS, names)
        for size in args.sizes
    ]
    results = list(in_processes(run_cell, cells, args.replays, processes=args.processes))
    write(args.out, report(args, names, results))


def report(
    args: argparse.Namespace, names: list[str], results: Sequence[tuple[Cell, Rollouts]]
) -> dict[str, Any]:
    of_sums = {sums: [one for one in results if one[0].sums == sums] for sums in SUMS}
    tables = {sums: summary(some) for sums, some in of_sums.items()}
    for sums, table in tables.items():
        for name, one in table.items():
            print(f"{sums}, {name}: {one}")
    cells = {
        f"{cell}, {cell.sums}": {
            **of_all(rollouts),
            "seconds": {
                name: round(fmean(one["seconds"][name] for one in rollouts), 2)
                for name in rollouts[0]["seconds"]
            },
        }
        for cell, rollouts in results
    }
    return {
        "what": (__doc__ or "").split("\n\n", 2)[2],
        "lengths": names,
        "replays_per_cell": args.replays,
        "percent": tables,
        "cells": cells,
    }


if __name__ == "__main__":
    main()
