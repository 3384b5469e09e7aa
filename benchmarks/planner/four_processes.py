"""PPO of four processes on two cores: all models on all of them, or `--placement split`, in turns.

    python -m benchmarks.planner.four_processes --out benchmarks/results/four_processes_cpu2.json

Each process has one CPU device, and the four share two cores, so that no placement has more to compute with
than another. What differs is how many processes each pass gathers weights over, which gloo does by the
loopback network. Medians of the seconds of an iteration, without the first of each run.
"""

import json
import socket
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.report import machine, median_interval, options, write

PROCESSES, ROUNDS, STEPS = 4, 2, 7
SYSTEMS = {
    "flatten": "--placement flatten",
    "flatten, a copy in each process": "--placement flatten --fsdp_size 1",
    "split": "--placement split",
    "split, a copy in each process": "--placement split --fsdp_size 1",
}
ASKED = f"""
    --preset ppo --devices {PROCESSES} --algorithm.beta 0.05 --warm_start.steps 5 --eval.every 0
    --steps {STEPS} --checkpoint.every {STEPS} --layout dp4tp1 --rollout.compile all
"""
STAGES = "step", "rollout", "reward", "update", "transfer"


def ran(asked: str, folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run's iterations but the first."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "pat_jax.train", *ASKED.split(), *asked.split()]
    command += ["--run_dir", str(folder), "--distributed.coordinator", f"localhost:{port}"]
    command += ["--distributed.num_processes", str(PROCESSES), "--distributed.process_id"]
    started = [
        subprocess.Popen([*command, str(i)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for i in range(PROCESSES)
    ]
    assert [one.wait() for one in started] == [0] * PROCESSES, asked
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "timing/step" in row][1:]


def main() -> None:
    args = options(__doc__).parse_args()
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in SYSTEMS}
    for number in range(ROUNDS):
        for name, asked in SYSTEMS.items():
            with TemporaryDirectory() as folder:
                seen[name] += ran(asked, Path(folder) / "run")
            print(number, name, [round(x["timing/step"], 2) for x in seen[name]], flush=True)
    rng, found = np.random.default_rng(0), {}
    for name, rows in seen.items():
        interval = median_interval([x["timing/step"] for x in rows], rng)
        found[name] = {
            "step_s": dict(zip(("median", "low", "high"), interval, strict=True)),
            "stages_s": {x: median(row[f"timing/{x}"] for row in rows) for x in STAGES},
            "steps_s": [row["timing/step"] for row in rows],
        }
    best = min(x["step_s"]["median"] for name, x in found.items() if name.startswith("flatten"))
    least = min(x["step_s"]["median"] for name, x in found.items() if name.startswith("split"))
    write(
        args.out,
        {"machine": machine(), "best_flatten_over_split": best / least, "placements": found},
    )


if __name__ == "__main__":
    main()
