"""What it takes that several processes agree on every decision of a rollout.

    python -m benchmarks.agreed_decisions --out benchmarks/results/agreed_decisions_cpu2.json

The demonstration's policy and rollouts by one process with all devices and by two with half of them each,
by turns; of each rollout the seconds that the host decides (`timing/rollout/plan`: planner, table of
rows, and with two processes the sending of it) beside those of its bursts (`timing/rollout/decode`). The
first rollouts, which warm up, are left out.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.adaptive_vs_static import describe_machine
from pat_jax.common.devices import configure
from pat_jax.run.metrics import read_metrics

DECIDE, DECODE = "timing/rollout/plan", "timing/rollout/decode"
OPTIONS = ("--preset", "demo", "--eval.every", "0", "--checkpoint.every", "1000")
WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rollouts", type=int, default=15, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    machine = describe_machine(configure(0))
    found: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    for _ in range(args.rounds):
        for processes, rollouts in found.items():
            rollouts += measured(processes, args.devices, args.rollouts + WARM_UP)
    report = {f"{count} process{'es' * (count > 1)}": summary(x) for count, x in found.items()}
    print(json.dumps(report, indent=1))
    if args.out:
        command = "python -m benchmarks.agreed_decisions " + " ".join(sys.argv[1:])
        about = {"command": command, "machine": machine}
        args.out.write_text(json.dumps(about | report, indent=1) + "\n")


def measured(processes: int, devices: int, steps: int) -> list[dict[str, float]]:
    """Seconds of each rollout's stages."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        options = [
            *OPTIONS,
            "--devices",
            str(devices),
            "--steps",
            str(steps),
            "--run_dir",
            str(run),
        ]
        port = _free_port()
        running = [_start(options, i, processes, port) for i in range(processes)]
        for one in running:
            said, _ = one.communicate()
            if one.returncode:
                raise SystemExit(said)
        rows = [row for row in read_metrics(run / "metrics.jsonl") if DECIDE in row]
        return rows[WARM_UP:]


def _start(options: Sequence[str], index: int, count: int, port: int) -> subprocess.Popen[str]:
    several = ["--distributed.coordinator", f"localhost:{port}"]
    several += ["--distributed.num_processes", str(count), "--distributed.process_id", str(index)]
    command = [sys.executable, "-m", "pat_jax.train", *options, *several * (count > 1)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, **piped)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def summary(rollouts: Sequence[dict[str, float]]) -> dict[str, float]:
    return {
        "rollouts": len(rollouts),
        "decide_s": round(median(row[DECIDE] for row in rollouts), 5),
        "decode_s": round(median(row[DECODE] for row in rollouts), 5),
        "decide_over_decode": round(median(row[DECIDE] / row[DECODE] for row in rollouts), 4),
    }


if __name__ == "__main__":
    main()
