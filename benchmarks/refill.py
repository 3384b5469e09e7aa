"""When a burst should end for those that wait: decode steps and bursts by how many rows are free then.

    python -m benchmarks.refill --data ../shared/data --out benchmarks/results/refill.json

`--sequences` real response lengths, cut at 2,048 tokens, through `--rows` rows of one group, in bursts of
64 steps tested every 8. Counted by the engine's own accounts; no device. A burst costs `--gap` decode
steps besides its own: the host's work and the prefill of few sequences, while the devices wait.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from benchmarks.workloads import read
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.sequences import accounts
from pat_jax.engine.sequences.accounts import Accounts

CAP = 2048
PARTS = (0, 2, 4, 8, 16)  # one of so many rows is free when a burst ends; 0: only at its last step


def rollout(responses: np.ndarray, rows: int, part: int) -> dict[str, int]:
    """Decode steps and bursts."""
    config, bursts = RolloutConfig(), 0
    book = Accounts(
        np.ones(len(responses)),
        np.full(len(responses), CAP),
        num_groups=1,
        rows_per_group=rows,
    )
    while book.has_work:
        book.deal()
        live = book.live
        left = responses[live] - (book.length - book.prompt_length)[live]
        stop_at = book.refill_at if part else 0
        ends = np.sort(left)[len(left) - stop_at - 1]  # steps until as few are live
        check = config.check_every
        steps = int(min(config.burst_steps, -(-ends // check) * check))
        book.advance(np.minimum(left, steps), left > steps, steps)
        bursts += 1
    return {"steps": book.num_steps, "bursts": bursts}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--gap", type=float, default=2.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found, engines = {}, accounts.REFILL_PART
    for name, lengths in read(args.data).items():
        chance = lengths.weights / lengths.weights.sum()
        drawn = np.random.default_rng(0).choice(lengths.responses, args.sequences, p=chance)
        responses = np.clip(drawn, 1, min(lengths.cap, CAP)).astype(int)
        found[name] = {"least_steps": int(responses.sum()) // args.rows}
        for part in PARTS:
            accounts.REFILL_PART = part
            done = rollout(responses, args.rows, part)
            found[name][part] = done | {"cost": done["steps"] + args.gap * done["bursts"]}
            print(name, f"1/{part}" if part else "never", found[name][part], flush=True)
    if args.out:
        command = "python -m benchmarks.refill " + " ".join(sys.argv[1:])
        options = {"rows": args.rows, "gap_steps": args.gap, "engine": engines}
        args.out.write_text(json.dumps({"command": command, **options, "lengths": found}, indent=1))


if __name__ == "__main__":
    main()
