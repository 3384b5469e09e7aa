"""The evaluation of the PAT paper (arXiv 2605.23945), replayed, beside its published figures.

    python -m benchmarks.paper_table --data ../shared/data --out benchmarks/results/paper_table.json

Llama-3.1-8B with responses of up to 24K tokens and Qwen3-14B up to 16K, on 8xH100 and 8xA40 (PCIe),
128 responses a batch. No rollout ran on a GPU: the planner, the buckets and the rules of the engine
are those that ship, on a simulated clock; what a step takes is composed from kernel times
(`profiling/predict/composer.py`: tables of the H100 with --data, coefficients without; of the A40 its maker's
rates alone), what a switch takes from the bytes that this engine moves.

Assumed: lengths are log-normal with the two quantiles that are known, P(> 8K) = 10.85 % and 2.8 of 128
responses at the cap; prompts of 64 to 256 tokens; the KV cache fits; the share of an iteration that
is not generation follows from the published pairs. Which static TP the paper compares with is not
known here: the gain over each of them is given. Then what decides is varied, one at a time: how
devices sum, how long the host takes, how large the batch is, what a switch costs.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks.kernel_tables import SPLITS, add_data_option
from benchmarks.naive import NaiveThreshold
from benchmarks.paper_settings import PAPER, Published, Setting, varied
from pat_jax.engine.report import RolloutReport
from pat_jax.planning.planner.planner import CostModelPlanner, Planner
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.profiling.predict.sources import EXPLAINED
from pat_jax.profiling.simulate.machine import Machine
from pat_jax.profiling.simulate.simulator import replay

NAIVE, ADAPTIVE = "naive threshold", "adaptive"
USUAL, SAME = "as assumed", "as assumed, these batches"
STATICS = [f"static tp{split.tp}" for split in SPLITS]
LEFT = [
    f"{name}, uneven" for name in STATICS
]  # a group's sequences stay there, as in other engines


def systems(setting: Setting, machine: Machine) -> Iterator[tuple[str, Planner]]:
    lengths = setting.seen()
    for name, left, split in zip(STATICS, LEFT, SPLITS, strict=True):
        yield name, CostModelPlanner((split,), machine.truth, lengths)
        yield left, FixedLayout(split)
    yield NAIVE, NaiveThreshold(SPLITS)
    yield ADAPTIVE, CostModelPlanner(SPLITS, machine.truth, lengths)


def share_after_switch(run: RolloutReport) -> float:
    """Of a rollout's time, what lies behind its first switch; 0 where there is none."""
    trace = run.trace
    if not trace.switches:
        return 0.0
    first = trace.switches[0]
    after = next(
        s for s, step in zip(trace.times_s, trace.steps, strict=True) if step >= first.step
    )
    return 1 - (after - first.seconds) / trace.total_s


def run_setting(setting: Setting, replays: int, data: Path | None) -> dict[str, object]:
    """Seconds of every system in every replay, and what the adaptive one did."""
    machine = setting.machine(data)
    seconds: dict[str, list[float]] = {}
    after, switch_s, switches, paths = [], [], [], {}
    for seed in range(replays):
        workload = setting.workload(seed)
        for name, planner in systems(setting, machine):
            run = replay(workload, planner, machine)
            seconds.setdefault(name, []).append(run.total_s)
            if name == ADAPTIVE:
                after.append(share_after_switch(run))
                switch_s.append(run.spent("switch"))
                switches.append(len(run.trace.switches))
                path = " > ".join(run.trace.path)
                paths[path] = paths.get(path, 0) + 1
    return {
        "seconds": seconds,
        "share_after_switch": after,
        "switch_s": switch_s,
        "switches": switches,
        "paths": paths,
        "costs": EXPLAINED[setting.composer(data).kernels.source],
    }


def summary(found: Mapping, share: float) -> dict[str, object]:
    """Of one setting, percent; means over replays of what each of them gained."""
    seconds = {name: np.array(values) for name, values in found["seconds"].items()}
    best = np.min([seconds[name] for name in STATICS], axis=0)
    baselines = {name: seconds[name] for name in (*STATICS, *LEFT, NAIVE)} | {"best static": best}
    gains = {name: 1 - seconds[ADAPTIVE] / base for name, base in baselines.items()}
    fastest = min(STATICS, key=lambda name: seconds[name].mean())
    return {
        "seconds": {name: round(float(s.mean()), 2) for name, s in seconds.items()},
        "less_generation_time": {name: interval(100 * gain) for name, gain in gains.items()},
        "throughput": {
            name: round(float((1 / (1 - share * gain)).mean()), 3) for name, gain in gains.items()
        },
        "best_static": fastest,
        "time_after_switch": round(100 * float(np.mean(found["share_after_switch"])), 1),
        "switches": round(float(np.mean(found["switches"])), 2),
        "switch_time": round(
            100 * float(np.mean(np.array(found["switch_s"]) / seconds[ADAPTIVE])), 2
        ),
        "paths": found["paths"],
        "costs": found["costs"],
    }


def interval(values: np.ndarray) -> dict[str, float]:
    """Mean and its 95 % bootstrap interval."""
    draws = np.random.default_rng(0).choice(values, (500, len(values))).mean(axis=1)
    low, high = np.quantile(draws, [0.025, 0.975])
    named = {"mean": values.mean(), "low": low, "high": high}
    return {name: round(float(value), 1) for name, value in named.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_data_option(parser)
    parser.add_argument("--replays", type=int, default=8, help="batches of each setting")
    parser.add_argument("--varied", type=int, default=3, help="batches where something is varied")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    tables = measure(args)
    for setting, published in PAPER.items():
        print_setting(setting, published, tables[str(setting)])
    for line in (decided := what_decides(tables)):
        print(line)
    if args.out:
        content = {
            "command": "python -m benchmarks.paper_table " + " ".join(sys.argv[1:]),
            "what": (__doc__ or "").split("\n\n", 2)[2],
            "batches": {"as assumed": args.replays, "varied": args.varied},
            "published": {str(setting): asdict(p) for setting, p in PAPER.items()},
            "settings": tables,
            "what_decides": decided,
        }
        args.out.write_text(json.dumps(content, indent=1))


def measure(args: argparse.Namespace) -> dict[str, dict[str, dict]]:
    """Every setting of the paper as assumed; and varied, beside the same batches as assumed."""
    data = args.data if (args.data / "calibration").is_dir() else None
    jobs = [(base, USUAL, base, args.replays) for base in PAPER]
    jobs += [(base, name, s, args.varied) for base in PAPER for name, s in varied(base).items()]
    bases, names, settings, replays = zip(*jobs, strict=True)
    tables: dict[str, dict[str, dict]] = {}
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        results = pool.map(run_setting, settings, replays, repeat(data))
        for base, name, found in zip(bases, names, results, strict=True):
            share, table = PAPER[base].generation_share, tables.setdefault(str(base), {})
            table[name] = summary(found, share)
            if name == USUAL:
                table[SAME] = summary(first(found, args.varied), share)
            print(f"{base}: {name}", file=sys.stderr)
    return tables


def first(found: Mapping, count: int) -> dict[str, object]:
    """The same of the first few batches."""
    few = {name: found[name][:count] for name in ("share_after_switch", "switch_s", "switches")}
    seconds = {name: values[:count] for name, values in found["seconds"].items()}
    return {**found, **few, "seconds": seconds}


def print_setting(setting: Setting, published: Published, table: Mapping[str, Mapping]) -> None:
    usual = table[USUAL]
    less = published.less_generation
    print(f"\n{setting}; costs: {usual['costs']}")
    said = "not published" if less is None else f"{less:.1f} % less generation time"
    print(f"  the paper: {said}, {published.throughput:.2f}x iteration throughput")
    print(f"  {'replayed, gain over':24}{'generation time':>24}{'throughput':>12}")
    for name, gain in usual["less_generation_time"].items():
        spread = f"{gain['mean']:6.1f} % ({gain['low']:.1f} to {gain['high']:.1f})"
        print(f"  {name:24}{spread:>24}{usual['throughput'][name]:11.2f}x")
    print(
        f"  {usual['time_after_switch']} % of the time after the first of {usual['switches']} switches, "
        f"{usual['switch_time']} % of it switching; the best static is {usual['best_static']}"
    )
    print(
        f"  {'generation time less, %, with':40}" + "".join(f"{n[-4:]:>8}" for n in STATICS), end=""
    )
    print(f"{'best':>8}{'naive':>8}   best static")
    for name, row in table.items():
        gains = row["less_generation_time"]
        cells = (*STATICS, "best static", NAIVE)
        numbers = "".join(f"{gains[cell]['mean']:8.1f}" for cell in cells)
        print(f"  {name:40}{numbers}   {row['best_static']}")


def what_decides(tables: Mapping[str, Mapping[str, Mapping]]) -> list[str]:
    """How far each assumption moves the gain over the best static layout and over TP2, in points."""
    moved: dict[str, list[tuple[float, float]]] = {}
    for table in tables.values():
        usual = table[SAME]["less_generation_time"]
        for name, row in table.items():
            gains = row["less_generation_time"]
            by = [gains[n]["mean"] - usual[n]["mean"] for n in ("best static", "static tp2")]
            moved.setdefault(name, []).append((by[0], by[1]))
    order = sorted(moved, key=lambda name: -max(abs(x) for pair in moved[name] for x in pair))
    return [
        f"{name}: gain over the best static moves by "
        f"{', '.join(f'{best:+.1f}' for best, _ in moved[name])} points, over TP2 by "
        f"{', '.join(f'{tp2:+.1f}' for _, tp2 in moved[name])}"
        for name in order
        if name not in (USUAL, SAME)
    ]


if __name__ == "__main__":
    main()
