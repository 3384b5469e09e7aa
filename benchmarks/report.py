"""What benchmarks share: their options, how systems take turns, intervals, and the JSON that they write."""

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from pat_jax.common.devices import Device

Batch = TypeVar("Batch")
Cell = TypeVar("Cell")
Found = TypeVar("Found")


def options(doc: str | None, *, has_data: bool = False) -> argparse.ArgumentParser:
    """A parser that has `--out`, and `--data` for benchmarks that read published measurements."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="JSON file for what was seen")
    if has_data:
        parser.add_argument(
            "--data",
            type=_data,
            default="../shared/data",
            help="folder that holds calibration/ (kernel tables), lengths/ and speculation/",
        )
    return parser


def _data(text: str) -> Path:
    if lacking := [x for x in ("calibration", "lengths") if not Path(text, x).is_dir()]:
        raise argparse.ArgumentTypeError(f"{text} has no folder {lacking[0]}")
    return Path(text)


def command() -> str:
    """The command that runs, as somebody would type it."""
    spec = sys.modules["__main__"].__spec__
    return shlex.join(["python", "-m", spec.name if spec else "benchmarks", *sys.argv[1:]])


def write(out: Path | None, content: Mapping[str, Any]) -> None:
    """The command and `content`, if there is a file to write."""
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"command": command(), **content}, indent=1, ensure_ascii=False)
        out.write_text(text + "\n")


def machine(devices: Sequence[Device] = ()) -> dict[str, Any]:
    """This machine, and the devices that a benchmark runs on, if it runs on any."""
    about = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in about.splitlines() if "model name" in line]
    used = {"devices": f"{len(devices)} x {devices[0].device_kind}"} if devices else {}
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        **used,
        "load_before": os.getloadavg()[0],
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def by_turns(
    systems: Mapping[str, Callable[[Batch], float]], batches: Iterable[Batch], warm_up: int = 0
) -> dict[str, list[float]]:
    """Seconds of each system for each batch: all systems one after the other, batch by batch.

    Args:
      warm_up: batches at the beginning that do not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for nth, batch in enumerate(batches):
        for name, run in systems.items():
            taken = run(batch)
            if nth >= warm_up:
                seconds[name].append(taken)
            print(f"round {nth} {name}: {taken:.2f} s", file=sys.stderr)
    return seconds


def median_interval(
    samples: Sequence[float], rng: np.random.Generator
) -> tuple[float, float, float]:
    """Median with a 95 % bootstrap interval."""
    draws = np.median(rng.choice(np.array(samples), (2000, len(samples))), axis=1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(np.median(samples)), float(low), float(high)


def in_processes(
    run: Callable[..., Found], cells: Sequence[Cell], *args: Any, processes: int | None
) -> Iterator[tuple[Cell, Found]]:
    """`run(cell, *args)` of each cell, in their order."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        results = pool.map(run, cells, *map(repeat, args))
        for nth, (cell, found) in enumerate(zip(cells, results, strict=True)):
            print(f"{nth + 1}/{len(cells)} {cell}", file=sys.stderr)
            yield cell, found
