"""How far adapting may fall behind the best static layout where it is hard to plan.

    python -m benchmarks.planner.hard_regret --data ../shared/data --out benchmarks/results/hard_regret.json

Two grids on 8xH100. "pressed": pools that are too small for all sequences, with eight samples a prompt.
"small": rollouts of a few responses, whose lengths have two or three values and are believed to be
others, some with switches ten times as dear (and known to be) or with host time that no profile has.
Kernel times were measured on the GPU, steps, switches and pools are computed from them and from the
model's shapes, lengths of the first grid are real ones drawn anew; no rollout ran on a GPU. Static
layouts follow the same engine rules and keep their groups even.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from benchmarks.planner.hard_cells import (
    Outcome,
    Pressed,
    Small,
    outcome,
    pressed_cells,
    small_cells,
)
from benchmarks.report import machine, options, write

FROM_GIB = 10.0  # pools of the goal


def summary(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """Percent, and switches."""
    done = list(outcomes)
    loss = 100 * np.array([one.loss for one in done])
    switches = np.array([one.switches for one in done])
    named = {
        "rollouts": len(done),
        "mean": loss.mean(),
        "mean_of_losses": np.maximum(loss, 0).mean(),
        "worst": loss.max(),
        "more_than_2": 100 * (loss > 2).mean(),
        "more_than_5": 100 * (loss > 5).mean(),
        "most_switches": int(switches.max()),
        "mean_switches": switches.mean(),
    }
    return {name: round(float(value), 3) for name, value in named.items()}


def tables(done: Mapping[Pressed | Small, list[Outcome]]) -> dict[str, dict[str, float]]:
    def of(chosen: Callable[[Any], bool]) -> list[Outcome]:
        return [one for cell, outcomes in done.items() if chosen(cell) for one in outcomes]

    parts = {
        "pools of 10 to 40 GiB": lambda c: isinstance(c, Pressed) and c.pool_gib >= FROM_GIB,
        "pools below": lambda c: isinstance(c, Pressed) and c.pool_gib < FROM_GIB,
        "small": lambda c: isinstance(c, Small),
    }
    return {name: summary(found) for name, chosen in parts.items() if (found := of(chosen))}


def measure(args: argparse.Namespace) -> dict[Pressed | Small, list[Outcome]]:
    cells: list[Pressed | Small] = []
    if "pressed" in args.grids:
        cells += pressed_cells()
    if "small" in args.grids:
        cells += small_cells(args.small)
    done = {}
    for cell in cells:
        done[cell] = [outcome(cell.trial(args.data, seed)) for seed in range(args.draws)]
        worst = max(done[cell], key=lambda one: one.loss)
        print(f"{100 * worst.loss:6.1f} % {worst.switches:4} switches  {cell}", file=sys.stderr)
    return done


def main() -> None:
    parser = options(__doc__, has_data=True)
    grids = ("pressed", "small")
    parser.add_argument("--grids", nargs="+", choices=grids, default=list(grids))
    parser.add_argument("--draws", type=int, default=2, help="of each cell")
    parser.add_argument("--small", type=int, default=200, help="cells of the grid that are drawn")
    args = parser.parse_args()
    started, used = time.time(), time.process_time()
    done = measure(args)
    result = tables(done)
    for name, table in result.items():
        print(f"{name}: " + ", ".join(f"{key} {value:g}" for key, value in table.items()))
    write(
        args.out,
        {
            "machine": machine(),
            "seconds": round(time.time() - started),
            "processor_seconds": round(time.process_time() - used),
            "what": (__doc__ or "").split("\n\n")[2],
            "percent": result,
            "cells": {str(cell): summary(outcomes) for cell, outcomes in done.items()},
        },
    )


if __name__ == "__main__":
    main()
