"""The demo with drafts and without, by turns: what it learns, and what its rollouts take.

    python -m benchmarks.demo_drafts --out benchmarks/results/demo_drafts_cpu2.json

`python -m pat_jax.train` as it is, and with `--speculation.source suffix`: on a CPU, so small a model has no drafts
by itself. Whether there are some is then the planner's choice in every burst. Each run begins anew, with the
programs that those before it have left on the disk.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lossless import machine
from pat_jax.run.metrics import read_metrics

SOURCES = ("none", "suffix")
HELD_OUT = "eval/reward"


def train(source: str, seed: int, folder: Path) -> dict[str, Any]:
    """One run of the command."""
    options = ["--speculation.source", source, "--seed", str(seed), "--run_dir", str(folder)]
    subprocess.run([sys.executable, "-m", "pat_jax.train", *options], check=True)
    rows = read_metrics(folder / "metrics.jsonl")

    def of(name: str) -> list[float]:
        return [row[name] for row in rows if name in row]

    return {
        "held_out": [round(x, 3) for x in of(HELD_OUT)],
        "rollouts_s": round(sum(of("timing/rollout")), 2),
        "drafted": int(sum(of("rollout/drafted"))),
        "accepted": int(sum(of("rollout/accepted"))),
    }


def summary(runs: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    pairs = zip(*(runs[source] for source in SOURCES), strict=True)
    ratios = [without["rollouts_s"] / drafted["rollouts_s"] for without, drafted in pairs]
    return {
        "last held-out reward": {
            source: [one["held_out"][-1] for one in found] for source, found in runs.items()
        },
        "rollouts without drafts / with them": [round(x, 3) for x in ratios],
        "median": round(float(np.median(ratios)), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {source: [] for source in SOURCES}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            for source in SOURCES if number % 2 == 0 else SOURCES[::-1]:
                runs[source].append(train(source, 0, Path(folder) / f"{source}{number}"))
                print(source, runs[source][-1], flush=True)
    result = {
        "command": "python -m benchmarks.demo_drafts " + " ".join(sys.argv[1:]),
        "machine": machine(),
        **summary(runs),
        "runs": runs,
    }
    print(json.dumps({name: x for name, x in result.items() if name != "runs"}, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
