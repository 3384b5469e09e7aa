"""What the first command costs: with an empty cache of programs, by turns with an older checkout.

    python -m benchmarks.speed.first_command --before ../before --before_python ../before/.venv/bin/python

Processor seconds are those of the command and its children; other load inflates them.
"""

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import machine, options, write
from pat_jax.common.devices import configure

HERE = Path(__file__).parents[2]
COMMAND = ("-m", "pat_jax.train")


def once(checkout: Path, python: str, options: list[str]) -> dict[str, Any]:
    """The command in a process of its own, from an empty folder and with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        cache = str(Path(folder) / "cache" / "xla")
        environment = os.environ | {"PAT_JAX_CACHE": cache, "PYTHONPATH": str(checkout.resolve())}
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        command = [python, *COMMAND, *options]
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        return {
            "processor_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            "seconds": seconds,
            "heldout": heldout(done.stdout),
        }


def heldout(output: str) -> list[float]:
    """The first and the last accuracy that the command has printed."""
    found = re.search(r"held-out reward ([\d.]+) -> ([\d.]+)", output)
    if found is None:
        raise ValueError(
            f"the command has printed no held-out rewards; it ended with {output[-500:]!r}."
        )
    return [float(found[1]), float(found[2])]


def share(rounds: list[dict[str, Any]]) -> float:
    """Processor seconds now over those before, all rounds together."""
    now, before = (sum(one[side]["processor_s"] for one in rounds) for side in ("now", "before"))
    return now / before


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--before", type=Path, required=True, help="checkout to compare with")
    parser.add_argument("--before_python", default=sys.executable, help="Python of its environment")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    about, seed, rounds = machine(configure(0)), ["--seed", str(args.seed)], []
    for _ in range(args.rounds):
        now = once(HERE, sys.executable, seed)
        print("now", now, flush=True)
        before = once(args.before, args.before_python, seed)
        print("before", before, flush=True)
        rounds.append({"now": now, "before": before})
        result = {
            "machine": about,
            "processor_share": share(rounds),
            "rounds": rounds,
        }
        write(args.out, result)  # after each round: one takes minutes
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
