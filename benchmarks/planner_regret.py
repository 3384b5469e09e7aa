"""How far the online planner stays behind a clairvoyant one, over a grid of replayed rollouts.

    python -m benchmarks.planner_regret --data ../shared/data \
        --out benchmarks/results/planner_regret.json

{Llama-3.1-8B, Qwen3-14B} x {8xH100, 8xA100} x {128, 512, 2048 sequences} x response lengths of three
kinds (math, gsm, r1) and one without a tail (code). Kernel times were measured on the GPUs named,
steps and switches are composed from them (`kernel_tables.py`), response lengths are real ones drawn
anew for each replay; no rollout ran on a GPU. Prints a table and writes JSON.

    regret   time / clairvoyant time - 1      (`profiling/hindsight.py`, never slower than any planner)
    loss     time / best static time - 1      the best layout chosen afterwards, for each replay
    gain     1 - time / static time
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks.kernel_tables import (
    GPUS,
    MODELS,
    SPLITS,
    SWITCH_S,
    Composer,
    KernelTables,
    NoData,
    add_data_option,
)
from benchmarks.naive import NaiveThreshold
from benchmarks.response_lengths import LengthData, read
from pat_jax.config import RolloutConfig
from pat_jax.engine.buckets import Buckets
from pat_jax.models.presets import preset
from pat_jax.planning.latency import LatencyModel
from pat_jax.planning.lengths import LengthModel
from pat_jax.planning.planner import CostModelPlanner, FixedLayout, Planner
from pat_jax.profiling.hindsight import clairvoyant
from pat_jax.profiling.simulator import Machine, replay

SIZES = (128, 512, 2048)
TAILED, NO_TAIL = ("math", "gsm", "r1"), "code"
OTHER = {"math": "gsm", "gsm": "r1", "r1": "math", "code": "math"}  # to fit the wrong lengths on
FOLLOWING = 1_000_000  # seeds of the rollouts that follow one another
AFTERWARDS, AFTERWARDS_BEST = "by layout, next rollout", "clairvoyant, next rollout"
Beliefs = Callable[["Cell", LatencyModel, int], tuple[LatencyModel, LengthModel]]


@dataclass(frozen=True)
class Cell:
    """One point of the grid."""

    gpu: str
    model: str
    size: int
    lengths: str
    data: Path
    switch_s: float

    def machine(self) -> Machine:
        known = _lengths(self.data)[self.lengths]
        config = replace(
            RolloutConfig(),
            max_prompt_length=known.max_prompt,
            max_completion_length=known.cap,
            min_rows=1,
            min_length=512,
        )
        buckets = Buckets.build(
            SPLITS,
            capacity=self.size,
            min_rows=config.min_rows,
            min_length=config.min_length,
            max_length=config.max_prompt_length + config.max_completion_length,
        )
        composer = Composer(_kernels(self.data, self.gpu), preset(self.model), self.switch_s)
        return Machine.of(composer.latency_model(buckets), SPLITS, config, capacity=self.size)


@cache
def _kernels(data: Path, gpu: str) -> KernelTables:
    return KernelTables(data, gpu)


@cache
def _lengths(data: Path) -> dict[str, LengthData]:
    return read(data)


@cache
def _fitted(data: Path, name: str, cap: int) -> LengthModel:
    return _lengths(data)[name].fitted(cap)


def _own_lengths(cell: Cell) -> LengthModel:
    return _fitted(cell.data, cell.lengths, _lengths(cell.data)[cell.lengths].cap)


def right(cell: Cell, truth: LatencyModel, seed: int) -> tuple[LatencyModel, LengthModel]:
    del seed
    return truth, _own_lengths(cell)


def steps_wrong_alike(
    cell: Cell, truth: LatencyModel, seed: int
) -> tuple[LatencyModel, LengthModel]:
    """All step times by +20 % or all by -20 %."""
    factor = 1.2 if seed % 2 else 0.8
    table = {key: factor * seconds for key, seconds in truth.decode_table.items()}
    return replace(truth, decode_table=table), _own_lengths(cell)


def steps_wrong_by_layout(
    cell: Cell, truth: LatencyModel, seed: int
) -> tuple[LatencyModel, LengthModel]:
    """The step times of each layout by +20 % or -20 %, drawn for each: their order may change."""
    signs = np.random.default_rng((seed, 5)).choice([0.8, 1.2], len(SPLITS))
    factor = dict(zip(SPLITS, signs.tolist(), strict=True))
    table = {key: factor[key[0]] * seconds for key, seconds in truth.decode_table.items()}
    return replace(truth, decode_table=table), _own_lengths(cell)


def switches_wrong(cell: Cell, truth: LatencyModel, seed: int) -> tuple[LatencyModel, LengthModel]:
    """All switch costs three times too high or too low."""
    factor = 3.0 if seed % 2 else 1 / 3
    tables = {
        name: {key: factor * seconds for key, seconds in getattr(truth, name).items()}
        for name in ("reslice_table", "migrate_table", "prefill_table")
    }
    return replace(truth, **tables), _own_lengths(cell)


def lengths_wrong(cell: Cell, truth: LatencyModel, seed: int) -> tuple[LatencyModel, LengthModel]:
    """The length model of another data set."""
    del seed
    cap = _lengths(cell.data)[cell.lengths].cap
    return truth, _fitted(cell.data, OTHER[cell.lengths], cap)


BELIEFS: dict[str, Beliefs] = {
    "right": right,
    "steps +-20 %, all alike": steps_wrong_alike,
    "steps +-20 %, by layout": steps_wrong_by_layout,
    "switch costs x3 or /3": switches_wrong,
    "lengths of another set": lengths_wrong,
}


def run_cell(cell: Cell, num_replays: int) -> dict[str, list]:
    """Seconds of every system in every replay of one cell."""
    machine = cell.machine()
    seconds: dict[str, list] = {}

    def note(name: str, value: float) -> None:
        seconds.setdefault(name, []).append(value)

    data = _lengths(cell.data)[cell.lengths]
    for seed in range(num_replays):
        workload = data.sample(cell.size, seed)
        note("clairvoyant", clairvoyant(workload, machine).total_s)
        for name, planner in baselines().items():
            note(name, replay(workload, planner, machine).total_s)
        for name, beliefs in BELIEFS.items():
            planner = CostModelPlanner(SPLITS, *beliefs(cell, machine.truth, seed))
            note(name, replay(workload, planner, machine).total_s)
            if name == "steps +-20 %, by layout":
                # The planner has seen one rollout by now, of the same kind.
                other = data.sample(cell.size, FOLLOWING + seed)
                note(AFTERWARDS, replay(other, planner, machine).total_s)
                note(AFTERWARDS_BEST, clairvoyant(other, machine).total_s)
    return seconds


def baselines() -> dict[str, Planner]:
    return {
        **{f"static tp{split.tp}": FixedLayout(split) for split in SPLITS},
        "naive threshold": NaiveThreshold(SPLITS),
    }


def replan_ms(cell: Cell, live: int = 4096) -> dict[str, float]:
    """Milliseconds of one re-plan, alone on a core: synchronous, and with every sequence different."""
    machine = replace(cell, size=live).machine()
    planner = CostModelPlanner(SPLITS, *right(cell, machine.truth, 0))
    alike = _lengths(cell.data)[cell.lengths].sample(live, 0).load()
    group = np.arange(live) * SPLITS[0].dp // live
    generated = np.random.default_rng(0).integers(0, alike.budget)
    loads = {
        "all at one length": replace(alike, group=group),
        "all at other lengths": replace(
            alike,
            group=group,
            generated=generated,
            context=alike.context + generated,
            budget=alike.budget - generated,
        ),
    }
    return {
        name: _median_ms(lambda load=load: planner.plan(load, SPLITS[0]))
        for name, load in loads.items()
    }


def _median_ms(work: Callable[[], object], runs: int = 200) -> float:
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return round(1e3 * float(np.median(seconds)), 3)


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


def summary(seconds: dict[str, np.ndarray]) -> dict[str, dict]:
    """The table of the issue for a set of replays, percent."""
    statics = [f"static tp{split.tp}" for split in SPLITS]
    best_static = np.min([seconds[name] for name in statics], axis=0)
    systems = [*BELIEFS, "naive threshold", *statics]
    return {
        "regret": {
            name: quantities(seconds[name] / seconds["clairvoyant"] - 1) for name in systems
        },
        "loss_against_best_static": {
            name: quantities(seconds[name] / best_static - 1) for name in systems
        },
        "gain_over": {
            name: {
                "mean": round(100 * float(np.mean(1 - seconds["right"] / seconds[name])), 3),
                "best": round(100 * float(np.max(1 - seconds["right"] / seconds[name])), 3),
            }
            for name in [*statics, "naive threshold"]
        },
        "gain_over_best_static": quantities(1 - seconds["right"] / best_static),
        "regret_of_the_next_rollout": quantities(
            seconds[AFTERWARDS] / seconds[AFTERWARDS_BEST] - 1
        ),
    }


def pooled(results: dict[Cell, dict], chosen: Callable[[Cell], bool]) -> dict[str, np.ndarray]:
    cells = [seconds for cell, seconds in results.items() if chosen(cell)]
    return {name: np.concatenate([cell[name] for cell in cells]) for name in cells[0]}


def print_table(title: str, table: dict[str, dict]) -> None:
    print(f"\n{title}, percent")
    print(f"{'':26}{'regret':>8}{'p95':>8}{'worst':>8}   {'loss/best static':>16}{'worst':>8}")
    for name, regret in table["regret"].items():
        loss = table["loss_against_best_static"][name]
        print(
            f"{name:26}{regret['mean']:8.2f}{regret['p95']:8.2f}{regret['worst']:8.2f}"
            f"   {loss['mean']:16.2f}{loss['worst']:8.2f}"
        )
    following = table["regret_of_the_next_rollout"]
    print(
        f"{AFTERWARDS:26}{following['mean']:8.2f}{following['p95']:8.2f}{following['worst']:8.2f}"
    )
    for name, gain in table["gain_over"].items():
        print(f"gain over {name:16}{gain['mean']:8.2f} mean {gain['best']:8.2f} best")


def grid(args: argparse.Namespace) -> Iterator[Cell]:
    for gpu, model, size, lengths in product(GPUS, MODELS, SIZES, (*TAILED, NO_TAIL)):
        yield Cell(gpu, model, size, lengths, args.data, args.switch_s)


def measure(args: argparse.Namespace) -> dict[Cell, dict]:
    """Every cell, the largest first, in as many processes as asked for."""
    cells = sorted(grid(args), key=lambda cell: (cell.lengths == "r1", cell.size), reverse=True)
    results = {}
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        counts = [args.replays] * len(cells)
        for cell, seconds in zip(cells, pool.map(run_cell, cells, counts), strict=True):
            results[cell] = {name: np.array(values) for name, values in seconds.items()}
            print(f"{len(results)}/{len(cells)} {cell}", file=sys.stderr)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_data_option(parser)
    parser.add_argument("--replays", type=int, default=67, help="of each cell: 3 x 67 with tails")
    parser.add_argument("--switch_s", type=float, default=SWITCH_S, help="fixed cost of a switch")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    started = time.time()
    try:
        for gpu in GPUS:
            KernelTables(args.data, gpu)
        read(args.data)
    except NoData as error:
        sys.exit(str(error))
    first = Cell("8xH100", MODELS[0], SIZES[-1], "math", args.data, args.switch_s)
    replan = replan_ms(first)
    results = measure(args)
    tables = {
        "with a tail": summary(pooled(results, lambda cell: cell.lengths in TAILED)),
        "without a tail": summary(pooled(results, lambda cell: cell.lengths == NO_TAIL)),
    }
    for title, table in tables.items():
        print_table(title, table)
    print(f"\none re-plan at 4096 sequences, ms: {replan}")
    if args.out:
        args.out.write_text(json.dumps(report(args, tables, results, replan, started), indent=1))


def report(
    args: argparse.Namespace,
    tables: dict[str, dict],
    results: dict[Cell, dict],
    replan: dict[str, float],
    started: float,
) -> dict:
    by_cell = {}
    for cell in results:
        table = summary(pooled({cell: results[cell]}, lambda _: True))
        by_cell[f"{cell.model} on {cell.gpu}, {cell.size} sequences, {cell.lengths}"] = {
            "seconds": {name: round(float(np.mean(s)), 2) for name, s in results[cell].items()},
            "regret": {name: table["regret"][name] for name in BELIEFS},
            "gain_over_best_static": table["gain_over_best_static"],
        }
    return {
        "command": "python -m benchmarks.planner_regret " + " ".join(sys.argv[1:]),
        "machine": {
            "simulated_on": f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}",
            "python": platform.python_version(),
            "seconds": round(time.time() - started),
        },
        "what": (__doc__ or "").split("\n\n")[2],
        "replays_per_cell": args.replays,
        "replan_ms_at_4096": replan,
        "percent": tables,
        "cells": by_cell,
    }


if __name__ == "__main__":
    main()
