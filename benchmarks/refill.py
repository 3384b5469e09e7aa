"""When a burst should end for those that wait: decode steps and bursts by how many rows are free then.

    python -m benchmarks.refill --data ../shared/data --out benchmarks/results/refill.json

`--sequences` real response lengths, cut at 2,048 tokens, through `--rows` rows of one group, in bursts of
64 steps tested every 8. Decided by the engine's own controller; no device. A burst costs `--gap` decode
steps besides its own: the host's work and the prefill of few sequences, while the devices wait.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from benchmarks.workloads import free_of_charge, read
from pat_jax.engine import controller
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.planning.types import Split
from pat_jax.profiling.simulate.machine import Workload
from pat_jax.profiling.simulate.simulator import replay

CAP = 2048
PARTS = (0, 2, 4, 8, 16)  # one of so many rows is free when a burst ends; 0: only at its last step
ALONE = Split(1, 1)


def rollout(responses: np.ndarray, rows: int, part: int) -> dict[str, int]:
    """Decode steps and bursts."""
    controller.REFILL_PART = part or 1  # all rows: as if nobody waited
    workload = Workload(np.ones(len(responses), int), responses, CAP)
    done = replay(workload, FixedLayout(ALONE), free_of_charge(ALONE, rows, CAP + 1))
    return {"steps": done.decode_steps, "bursts": len(done.bursts)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--gap", type=float, default=2.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found, engines = {}, controller.REFILL_PART
    for name, lengths in read(args.data).items():
        chance = lengths.weights / lengths.weights.sum()
        drawn = np.random.default_rng(0).choice(lengths.responses, args.sequences, p=chance)
        responses = np.clip(drawn, 1, min(lengths.cap, CAP)).astype(int)
        found[name] = {"least_steps": int(responses.sum()) // args.rows}
        for part in PARTS:
            done = rollout(responses, args.rows, part)
            found[name][part] = done | {"cost": done["steps"] + args.gap * done["bursts"]}
            print(name, f"1/{part}" if part else "never", found[name][part], flush=True)
    if args.out:
        command = "python -m benchmarks.refill " + " ".join(sys.argv[1:])
        options = {"rows": args.rows, "gap_steps": args.gap, "engine": engines}
        args.out.write_text(json.dumps({"command": command, **options, "lengths": found}, indent=1))


if __name__ == "__main__":
    main()
