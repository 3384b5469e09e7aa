"""How long until every program of a rollout is there: the first start, and one with a cache on disk.

    python -m benchmarks.warm_up --out benchmarks/results/warm_up_cpu2.json

Each start is a process of its own, with an engine over all devices and all of its layouts. A round
is a start with an empty persistent cache, and a second one with what the first has left there.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.adaptive_vs_static import describe_machine
from benchmarks.decode_step import SMALL
from pat_jax.common.devices import configure
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.engine import RolloutEngine
from pat_jax.models.policy import Policy
from pat_jax.models.presets import preset


def start(model: str, sequences: int, new_tokens: int) -> dict[str, float]:
    """Compiles or loads every program here."""
    devices = configure(0)
    policy = Policy.from_config(SMALL if model == "small" else preset(model))
    config = replace(RolloutConfig(), max_prompt_length=64, max_completion_length=new_tokens)
    engine = RolloutEngine(policy, devices, config, capacity=sequences, eos_ids=(1,))
    count, began = len(engine.programs.missing()), time.perf_counter()
    engine.compile()
    return {"seconds": time.perf_counter() - began, "programs": count}


def in_a_process(args: argparse.Namespace, cache: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.warm_up", "--once", "--model", args.model]
    command += ["--sequences", str(args.sequences), "--new_tokens", str(args.new_tokens)]
    environment = os.environ | {"PAT_JAX_CACHE": cache}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="small", help="small (2.5 M), or a preset")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--new_tokens", type=int, default=448)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--once", action="store_true", help="one start, in this process")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.once:
        print(json.dumps(start(args.model, args.sequences, args.new_tokens)))
        return
    rounds = []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as cache:
            rounds.append([in_a_process(args, cache) for _ in range(2)])
        print(rounds[-1], file=sys.stderr)
    ratio = statistics.median(second["seconds"] / first["seconds"] for first, second in rounds)
    first, second = (statistics.median(r[i]["seconds"] for r in rounds) for i in range(2))
    print(f"first start {first:.1f} s, second {second:.1f} s: {100 * ratio:.0f} %")
    if args.out:
        command = "python -m benchmarks.warm_up " + " ".join(sys.argv[1:])
        machine = describe_machine(configure(0))
        content = {"command": command, "machine": machine, "second_over_first": ratio}
        args.out.write_text(json.dumps(content | {"rounds": rounds}, indent=1))


if __name__ == "__main__":
    main()
