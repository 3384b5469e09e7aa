"""How far the latency model is off at points that its profile does not hold.

    python -m benchmarks.latency_error --data ../shared/data \
        --out benchmarks/results/latency_error.json

Of this machine a real profile is measured, several times over by turns, with buckets between those
that a run would have (1, 2, 3, 4, 6, 8, 12 … rows; 128, 192, 256 … tokens). The time of a point is
its fastest repeat. Then some points are left out, and predicted from the others:

    between         the points between the powers of two, which are kept: another capacity or another
                    maximum length than was profiled
    every second    half of the powers of two, from the other half: a profile measured in less time
    most rows       the largest row bucket, from the smaller ones
    longest         the largest cache length, from the shorter ones

Error: |predicted / measured - 1|. Spread: |a repeat / the median of the others - 1|. Bucket: what a
look-up of the next larger bucket would say, in proportion past the last one.

The same for GPUs that are not here, where decode steps and prefills are composed from published
kernel measurements (`kernel_tables.py`): without noise, and in straight lines between the sizes that
were measured there.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from benchmarks.adaptive_vs_static import describe_machine
from benchmarks.kernel_tables import GPUS, MODELS, SPLITS, add_data_option, measured_kernels
from pat_jax.common.devices import Device, configure
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.device.programs import Key, ProgramTable
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.layout.buckets import Buckets
from pat_jax.engine.warm_up.warm_up import Warmup
from pat_jax.models.policy import Policy
from pat_jax.models.presets import preset
from pat_jax.planning.latency.model import LatencyModel
from pat_jax.planning.latency.step_model import Surface
from pat_jax.planning.types import Split
from pat_jax.profiling.predict.composer import Composer
from pat_jax.profiling.predict.kernel_files import NoData
from pat_jax.profiling.predict.kernels import Kernels

Points = Mapping[tuple[int, int], float]  # {(rows, length): seconds} of one layout


def with_midpoints(ladder: Sequence[int]) -> tuple[int, ...]:
    """Half-way between neighbours that are a factor of two apart."""
    return tuple(sorted({*ladder, *(3 * step // 2 for step in ladder[:-1] if step > 1)}))


def is_power_of_two(size: int) -> bool:
    return size & (size - 1) == 0


def kept_points(points: Points) -> dict[str, tuple[Points, Points]]:
    """For each way of leaving points out: (what is known, what is asked for)."""
    ladder = {at: s for at, s in points.items() if all(map(is_power_of_two, at))}
    rows, lengths = (sorted({at[axis] for at in ladder}) for axis in (0, 1))
    half = {*rows[1:-1:2]}, {*lengths[1:-1:2]}
    ways = {
        "between": (ladder, points),
        "every second": (
            {at: s for at, s in ladder.items() if at[0] not in half[0] and at[1] not in half[1]},
            ladder,
        ),
        "most rows": ({at: s for at, s in ladder.items() if at[0] < rows[-1]}, ladder),
        "longest": ({at: s for at, s in ladder.items() if at[1] < lengths[-1]}, ladder),
    }
    asked = {
        name: (known, {at: s for at, s in every.items() if at not in known})
        for name, (known, every) in ways.items()
    }
    return {name: (known, rest) for name, (known, rest) in asked.items() if known and rest}


def next_bucket(known: Points, at: tuple[int, int]) -> float:
    """The covering bucket's time; past the last one, in proportion."""
    rows, lengths = (sorted({point[axis] for point in known}) for axis in (0, 1))
    bucket = (
        min((n for n in rows if n >= at[0]), default=rows[-1]),
        min((n for n in lengths if n >= at[1]), default=lengths[-1]),
    )
    return known[bucket] * max(1.0, at[0] / bucket[0]) * max(1.0, at[1] / bucket[1])


def errors(tables: Iterable[Points]) -> dict[str, dict[str, float]]:
    """Of all layouts together, by what was left out; percent."""
    model: dict[str, list[float]] = {}
    naive: dict[str, list[float]] = {}
    for points in tables:
        for name, (known, asked) in kept_points(points).items():
            surface = Surface(known)
            for at, seconds in asked.items():
                model.setdefault(name, []).append(abs(surface(*at) / seconds - 1))
                naive.setdefault(name, []).append(abs(next_bucket(known, at) / seconds - 1))
    return {
        name: {
            "points": len(relative),
            "mean": round(100 * float(np.mean(relative)), 2),
            "p95": round(100 * float(np.quantile(relative, 0.95)), 2),
            "worst": round(100 * float(np.max(relative)), 2),
            "next_bucket_mean": round(100 * float(np.mean(naive[name])), 2),
        }
        for name, relative in model.items()
    }


def decode_points(latency: LatencyModel) -> list[Points]:
    return [surface.points for surface in latency.decode.values()]


def prefill_points(latency: LatencyModel) -> list[Points]:
    return [surface.points for surface in latency.prefill.values()]


def spread(repeats: Sequence[Mapping]) -> dict[str, float]:
    """Of a repeat from the median of the others, percent."""
    seconds = np.array([[repeat[key] for key in repeats[0]] for repeat in repeats])
    off = [
        np.abs(seconds[i] / np.median(np.delete(seconds, i, axis=0), axis=0) - 1)
        for i in range(len(seconds))
    ]
    return {
        "mean": round(100 * float(np.mean(off)), 2),
        "p95": round(100 * float(np.quantile(off, 0.95)), 2),
    }


def fastest(repeats: Sequence[LatencyModel]) -> LatencyModel:
    def over(tables: Sequence[Mapping]) -> dict:
        return {key: min(table[key] for table in tables) for key in tables[0]}

    return replace(
        repeats[0],
        decode_table=over([repeat.decode_table for repeat in repeats]),
        prefill_table=over([repeat.prefill_table for repeat in repeats]),
    )


def build_engine(args: argparse.Namespace, devices: Sequence[Device]) -> RolloutEngine:
    """An engine that has the midpoints among its buckets, and no programs but those timed here."""
    config = replace(
        RolloutConfig(),
        max_prompt_length=args.min_length,
        max_completion_length=args.max_length - args.min_length,
        min_rows=1,
        min_length=args.min_length,
    )
    policy = Policy.from_config(preset(args.model))
    engine = RolloutEngine(policy, devices, config, capacity=args.sequences, eos_ids=(1,))
    ladder = engine.specs.buckets
    rows = {split: with_midpoints(steps) for split, steps in ladder.rows.items()}
    engine.specs = replace(engine.specs, buckets=Buckets(rows, with_midpoints(ladder.lengths)))
    engine.programs = ProgramTable()
    engine.specs.declare(engine.programs)
    keys = {
        Key(name, split, rows, length)
        for length in engine.specs.buckets.lengths
        for split, steps in engine.specs.buckets.rows.items()
        for name, buckets in (
            ("decode", steps),
            ("prefill", engine.specs.prefill_sizes),
        )
        for rows in buckets
    }
    keys |= {Key("allocate", split) for split in engine.layouts}
    print(f"compiling {len(keys)} programs", file=sys.stderr)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(engine.programs.compile, keys))
    return engine


def measure(args: argparse.Namespace, devices: Sequence[Device]) -> list[LatencyModel]:
    """Whole profiles of decoding and prefilling, one after the other."""
    engine = build_engine(args, devices)
    weights = jax.device_get(engine.policy.init(0))
    repeats = []
    for repeat in range(args.repeats):
        start = time.perf_counter()
        warmup = Warmup(engine, runs=args.runs)
        for layout in engine.layouts.values():
            placed = jax.device_put(weights, layout.param_shardings(engine.policy))
            engine.set_weights(placed, layout)
            warmup.decode_and_prefill(layout)
            engine.release_weights()
        repeats.append(warmup.measured)
        print(f"repeat {repeat}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
    return repeats


def this_machine(args: argparse.Namespace) -> dict[str, object]:
    devices = configure(0)
    machine = describe_machine(devices)
    repeats = measure(args, devices)
    latency = fastest(repeats)
    return {
        "machine": machine | {"load_after": os.getloadavg()[0]},
        "decode": {
            "spread": spread([repeat.decode_table for repeat in repeats]),
            "errors": errors(decode_points(latency)),
        },
        "prefill": {
            "spread": spread([repeat.prefill_table for repeat in repeats]),
            "errors": errors(prefill_points(latency)),
        },
        "decode_step_ms": {
            f"{split} rows {rows} length {length}": round(1e3 * seconds, 3)
            for (split, rows, length), seconds in latency.decode_table.items()
        },
    }


def composed(kernels: Kernels, model: str) -> dict[str, object]:
    composer = Composer(kernels, preset(model))
    ladder = Buckets.build(SPLITS, capacity=512, min_rows=1, min_length=512, max_length=16_384)
    lengths = with_midpoints(ladder.lengths)

    def decode(split: Split) -> Points:
        rows = with_midpoints(ladder.rows[split])
        return {(n, m): composer.decode_step(split, n, m) for n in rows for m in lengths}

    chunks = [{(1, m): composer.prefill_call(split, m) for m in lengths} for split in SPLITS]
    return {
        "decode": {"errors": errors(map(decode, SPLITS))},
        "prefill": {"errors": errors(chunks)},
    }


def show(title: str, result: Mapping) -> None:
    for call in ("decode", "prefill"):
        noise = result[call].get("spread")
        print(f"{title}, {call}" + (f": repeats spread by {noise['mean']} %" if noise else ""))
        for name, row in result[call]["errors"].items():
            print(
                f"  {name:13} {row['points']:5} points: mean {row['mean']:6.2f} %, p95 "
                f"{row['p95']:6.2f} %, worst {row['worst']:6.2f} %; next bucket "
                f"{row['next_bucket_mean']:6.2f} %"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_data_option(parser)
    parser.add_argument("--model", default="demo", help="a built-in shape")
    parser.add_argument("--sequences", type=int, default=64, help="largest batch, all devices")
    parser.add_argument("--min_length", type=int, default=128, help="shortest cache in tokens")
    parser.add_argument("--max_length", type=int, default=1024, help="longest cache in tokens")
    parser.add_argument("--repeats", type=int, default=7, help="whole profiles, by turns")
    parser.add_argument("--runs", type=int, default=3, help="timed runs of a program in a profile")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    start = time.perf_counter()
    results: dict[str, dict] = {}
    try:
        for gpu in GPUS:
            kernels = measured_kernels(args.data, gpu)
            for model in MODELS:
                results[f"{model} on {gpu}"] = composed(kernels, model)
    except NoData as error:
        sys.exit(str(error))
    results["this machine"] = this_machine(args)
    for title, result in results.items():
        show(title, result)
    if args.out:
        content = {
            "command": "python -m benchmarks.latency_error " + " ".join(sys.argv[1:]),
            "settings": {key: str(value) for key, value in vars(args).items()},
            "seconds": round(time.perf_counter() - start),
            "percent": results,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
