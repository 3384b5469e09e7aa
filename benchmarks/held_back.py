"""What it would give to hold half of the samples back where all have rows, so that they draft from whole siblings.

    python -m benchmarks.held_back --data ../shared/data --out benchmarks/results/held_back.json

Priced, not run: by the planner's dynamic program on the 8xH100 of `speculation_replay`, drafts of all sequences worth
the mean of a policy in RL, with all lengths known and 16 samples of each prompt, the prompts of the longest
responses first. In % of the seconds with all rows, below 0 where it saves: with rows for half, the first samples of each prompt one after the other; and with
rows for half in the order as asked, which gains nothing from siblings but rows that verify more.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.kernel_tables import add_data_option, measured_kernels
from benchmarks.recorded_drafts import recorded
from benchmarks.speculation_cells import (
    DRAFTS,
    GPU,
    INFORMED,
    Cell,
    drafting,
    grid,
)
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.planning.planner.stagger import Queue, Schedule
from pat_jax.planning.planner.stagger_prices import scheduled_forecast
from pat_jax.profiling.predict.kernel_files import NoData

SAMPLES, TRUTH = 16, "policy in RL"


def priced(cell: Cell, seed: int) -> tuple[float, float]:
    """Of half the rows, staggered and as asked: % of the seconds with all rows."""
    acceptance = recorded(cell.data, TRUTH, DRAFTS.longest).pooled
    machine = replace(cell.machine(), acceptance=acceptance)
    planner = dict(drafting(cell, machine))[INFORMED]
    assert isinstance(planner, CostModelPlanner)
    workload = cell.known.sample(cell.size, seed)
    prompt, lengths = np.arange(cell.size) // SAMPLES, workload.responses.astype(float)
    mean = np.bincount(prompt, lengths) / SAMPLES
    order = np.argsort(-mean[prompt], kind="stable")
    none = np.zeros(cell.size, bool)
    queue = Queue(workload.load(cell.size), order, prompt, none, cell.size)
    right = float(acceptance.tokens(DRAFTS.longest, DRAFTS.longest, 1)) - 1

    def seconds(order: np.ndarray, rows: int) -> float:
        schedule = Schedule.of(queue, order, lengths, rows, right)
        costs = planner._costs(scheduled_forecast(schedule, planner.splits, planner.grid))
        return float(costs.cheapest(planner.safety)[0].min())

    half, every = cell.size // 2, seconds(order, cell.size)
    found = (100 * (seconds(one, half) / every - 1) for one in (queue.staggered, order))
    return next(found), next(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_data_option(parser)
    parser.add_argument("--draws", type=int, default=3, help="of the lengths of each cell")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    try:
        measured_kernels(args.data, GPU)
    except NoData as error:
        sys.exit(str(error))
    found = {}
    for cell in grid(args.data):
        staggered, asked = np.array([priced(cell, seed) for seed in range(args.draws)]).T
        found[str(cell)] = {
            "staggered_percent": staggered.round(1).tolist(),
            "as_asked_percent": asked.round(1).tolist(),
        }
        print(cell, json.dumps(found[str(cell)]), flush=True)
    if args.out:
        command = "python -m benchmarks.held_back " + " ".join(sys.argv[1:])
        args.out.write_text(json.dumps({"command": command, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
