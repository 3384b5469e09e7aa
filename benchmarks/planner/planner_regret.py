"""How far the online planner stays behind an oracle one, over a grid of replayed rollouts.

    python -m benchmarks.planner.planner_regret --data ../shared/data \
        --out benchmarks/results/planner_regret.json

{Llama-3.1-8B, Qwen3-14B} x {8xH100, 8xA100} x {128, 512, 2048 sequences} x response lengths of
three kinds (math, gsm, r1) and one without a tail (code). Kernel times were measured on the GPUs
named. Steps and switches are composed from them (`profiling/predict/composer.py`). Response lengths
are real ones, drawn anew for each replay. No rollout ran on a GPU.

    regret   time / time of the oracle plan - 1    (`oracle.py`)
    loss     time / best static time - 1    the best layout chosen afterwards, for each replay
    gain     1 - time / static time

Each wrong belief is held by a planner that starts afresh. In the "next rollout" it has seen one.
"""

import argparse
import os
import time
from collections.abc import Iterator
from itertools import product

import numpy as np

from benchmarks.planner.kernel_tables import GPUS, MODELS, SPLITS
from benchmarks.planner.regret_cells import (
    BELIEFS,
    NO_TAIL,
    SIZES,
    TAILED,
    Cell,
    best_of,
    following,
    run_cell,
)
from benchmarks.report import in_processes, machine, options, write
from pat_jax.profiling.predict.composer import SWITCH_S


def quantities(excess: np.ndarray) -> dict[str, float]:
    """Of a relative excess of time, in percent; the interval is a bootstrap's, of the mean."""
    draws = np.random.default_rng(0).choice(excess, (500, len(excess))).mean(axis=1)
    low, high = np.quantile(draws, [0.025, 0.975])
    named = {
        "mean": excess.mean(),
        "mean_low": low,
        "mean_high": high,
        "p95": np.quantile(excess, 0.95),
        "worst": excess.max(),
    }
    return {name: round(100 * float(value), 3) for name, value in named.items()}


STATICS = [f"static tp{split.tp}" for split in SPLITS]


def summary(seconds: dict[str, np.ndarray]) -> dict[str, dict]:
    """The table of the issue for a set of replays, percent."""
    best_static = np.min([seconds[name] for name in STATICS], axis=0)
    return {
        **excess(seconds, [*held(seconds), "naive threshold", *STATICS]),
        "gain_over": {
            name: {
                "mean": round(100 * float(np.mean(1 - seconds["right"] / seconds[name])), 3),
                "best": round(100 * float(np.max(1 - seconds["right"] / seconds[name])), 3),
            }
            for name in [*STATICS, "naive threshold"]
        },
        "gain_over_best_static": quantities(1 - seconds["right"] / best_static),
        "next_rollout": excess(
            {name: seconds[following(name)] for name in seconds if following(name) in seconds},
            held(seconds),
        ),
    }


def held(seconds: dict[str, np.ndarray]) -> list[str]:
    """The beliefs that were replayed."""
    return [name for name in BELIEFS if name in seconds]


def excess(seconds: dict[str, np.ndarray], systems: list[str]) -> dict[str, dict]:
    """Regret and loss of each system."""
    best_static = np.min([seconds[name] for name in STATICS], axis=0)
    return {
        "regret": {
            name: quantities(seconds[name] / seconds[best_of(name)] - 1) for name in systems
        },
        "loss_against_best_static": {
            name: quantities(seconds[name] / best_static - 1) for name in systems
        },
    }


def pooled(results: dict[Cell, dict]) -> dict[str, np.ndarray]:
    cells = list(results.values())
    return {name: np.concatenate([cell[name] for cell in cells]) for name in cells[0]}


def print_excess(title: str, table: dict[str, dict]) -> None:
    print(f"\n{title}, percent")
    print(f"{'':33}{'regret':>8}{'p95':>8}{'worst':>8}   {'loss/best static':>16}{'worst':>8}")
    for name, regret in table["regret"].items():
        loss = table["loss_against_best_static"][name]
        print(
            f"{name:33}{regret['mean']:8.2f}{regret['p95']:8.2f}{regret['worst']:8.2f}"
            f"   {loss['mean']:16.2f}{loss['worst']:8.2f}"
        )


def grid(args: argparse.Namespace) -> Iterator[Cell]:
    each = product(args.gpus, MODELS, args.sizes, (*TAILED, NO_TAIL))
    for gpu, model, size, lengths in each:
        yield Cell(gpu, model, size, lengths, args.data, args.switch_s, args.host_us)


def measure(args: argparse.Namespace) -> Iterator[dict[Cell, dict]]:
    """The cells done so far, after each; in as many processes as asked for, the shortest first."""
    cells = sorted(grid(args), key=lambda cell: (cell.lengths == "r1", cell.size))
    results = {}
    replayed = in_processes(run_cell, cells, args.replays, args.beliefs, processes=args.processes)
    for cell, seconds in replayed:
        results[cell] = {name: np.array(values) for name, values in seconds.items()}
        yield results


def tables_of(results: dict[Cell, dict]) -> dict[str, dict]:
    parts: dict[str, dict[Cell, dict]] = {}
    for cell, seconds in results.items():
        name = "without a tail" if cell.lengths == NO_TAIL else "with a tail"
        parts.setdefault(name, {})[cell] = seconds
    return {name: summary(pooled(part)) for name, part in parts.items()}


def main() -> None:
    parser = options(__doc__, has_data=True)
    parser.add_argument("--replays", type=int, default=67, help="of each cell: 3 x 67 with tails")
    parser.add_argument("--gpus", nargs="+", choices=GPUS, default=list(GPUS))
    parser.add_argument("--sizes", nargs="+", type=int, choices=SIZES, default=list(SIZES))
    parser.add_argument("--beliefs", nargs="+", choices=BELIEFS, default=list(BELIEFS))
    parser.add_argument("--switch_s", type=float, default=SWITCH_S, help="fixed cost of a switch")
    parser.add_argument("--host_us", type=float, default=0.0, help="of a sequence, unknown")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    args = parser.parse_args()
    started = time.time()
    results = {}
    for results in measure(args):
        write(args.out, report(args, results, started))  # also of a run that is stopped
    for title, table in tables_of(results).items():
        print_excess(title, table)
        print_excess(f"{title}, next rollout", table["next_rollout"])


def report(args: argparse.Namespace, results: dict[Cell, dict], started: float) -> dict:
    by_cell = {}
    for cell in results:
        table = summary(pooled({cell: results[cell]}))
        by_cell[str(cell)] = {
            "seconds": {name: round(float(np.mean(s)), 2) for name, s in results[cell].items()},
            "regret": {name: table["regret"][name] for name in held(results[cell])},
            "next_rollout_regret": table["next_rollout"]["regret"],
            "gain_over_best_static": table["gain_over_best_static"],
        }
    return {
        "machine": machine() | {"seconds": round(time.time() - started)},
        "what": (__doc__ or "").split("\n\n")[2],
        "replays_per_cell": args.replays,
        "cells_done": f"{len(results)} of {len(list(grid(args)))}",
        "percent": tables_of(results),
        "cells": by_cell,
    }


if __name__ == "__main__":
    main()
