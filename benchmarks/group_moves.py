"""The share of a rollout's time in which sequences move between groups, in the replays of `speculation_replay`.

    python -m benchmarks.group_moves --data ../shared/data --out benchmarks/results/group_moves.json

The planner that learns what drafts are worth, on a simulated clock. That share is the most that any overlap of
moves with decoding could save. Rounds of pages are composed from measured links and memory; what the host takes to
dispatch a move is not in it. Beside it: that of switches of the layout, weights included, and what moves
were to save.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.kernel_tables import add_data_option, measured_kernels
from benchmarks.speculation_cells import GPU, PLANNED, Cell, drafting, grid, truths
from benchmarks.workloads import read
from pat_jax.engine.report import RolloutReport
from pat_jax.profiling.predict.kernel_files import NoData
from pat_jax.profiling.simulate.simulator import replay


def reports(cell: Cell, replays: int) -> list[RolloutReport]:
    """Of each truth of acceptance."""
    bare, found = cell.machine(), []
    for drafts in truths(cell).values():
        machine = replace(bare, acceptance=drafts.pooled)
        for seed in range(replays):
            planner = dict(drafting(cell, machine))[PLANNED]
            workload = drafts.draw(cell.known.sample(cell.size, seed), seed)
            found.append(replay(workload, planner, machine))
    return found


def summary(of: list[RolloutReport]) -> dict[str, float]:
    total = sum(one.total_s for one in of)
    moves = [move for one in of for move in one.balanced]
    return {
        "rollouts": len(of),
        "moves": len(moves),
        "sequences": sum(move.sequences for move in moves),
        "percent_of_time": round(100 * sum(one.spent("balance") for one in of) / total, 4),
        "worst_percent": round(100 * max(one.balance_share for one in of), 4),
        "switches_percent": round(100 * sum(one.spent("switch") for one in of) / total, 3),
        "saved_percent_predicted": round(100 * sum(x.predicted_saving_s for x in moves) / total, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_data_option(parser)
    parser.add_argument("--replays", type=int, default=3, help="of each cell")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    try:
        measured_kernels(args.data, GPU)
        read(args.data)
    except NoData as error:
        sys.exit(str(error))
    by_cell = {str(cell): reports(cell, args.replays) for cell in grid(args.data)}
    found = {name: summary(of) for name, of in by_cell.items()}
    found = {"all cells": summary([one for of in by_cell.values() for one in of]), **found}
    print(json.dumps(found, indent=1))
    if args.out:
        command = "python -m benchmarks.group_moves " + " ".join(sys.argv[1:])
        args.out.write_text(json.dumps({"command": command, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
