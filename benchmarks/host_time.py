"""The host's time per burst, by turns with another checkout.

    python -m benchmarks.host_time --before CHECKOUT/.venv/bin/python --out benchmarks/results/host_time.json

A model of next to nothing on one CPU device: what a burst of eight steps takes is mostly the host's
accounts and its calls of programs. Some sequences are live at once, others wait. Each round is a process
of each environment; within it the fastest of several rollouts counts, in processor time of the host's thread per burst.
"""

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

LIVE, WAITING, TOKENS, REPEATS = (16, 256), 2, 64, 5
# Where a checkout has its engine and its requests; those before have them elsewhere.
MODULES = (
    ("pat_jax.engine.engine", "pat_jax.engine.rollout"),
    (
        "pat_jax.engine.sequences.responses",
        "pat_jax.engine.sequences.sequence_table",
    ),
)


def find(modules: tuple[str, ...], name: str):
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"{name} is in none of {modules}.")


def milliseconds_per_burst(live: int) -> float:
    import jax
    import numpy as np

    from pat_jax.config.rollout import RolloutConfig
    from pat_jax.engine.device.sampling import sequence_key
    from pat_jax.models.config import ModelConfig
    from pat_jax.models.policy import Policy
    from pat_jax.planning.planner.scripts import FixedLayout

    engine_of, request = find(MODULES[0], "RolloutEngine"), find(MODULES[1], "Request")
    model = ModelConfig(
        architecture="qwen3",
        vocab_size=16,
        embed_dim=8,
        mlp_dim=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        qk_norm=True,
    )
    policy = Policy.from_config(model)
    config = replace(
        RolloutConfig(),
        max_prompt_length=16,
        max_completion_length=TOKENS,
        burst_steps=8,
        min_rows=live,
        min_length=128,
    )
    engine = engine_of(policy, jax.devices()[:1], config, capacity=live, eos_ids=())
    engine.compile()
    rng = np.random.default_rng(0)
    requests = [
        request(
            tuple(rng.integers(0, 16, 8).tolist()),
            sequence_key(0, i),
            int(rng.integers(8, TOKENS)),
            ignore_eos=True,
        )
        for i in range((1 + WAITING) * live)
    ]
    ((split, layout),) = engine.layouts.items()
    times = []
    for _ in range(REPEATS):
        engine.set_weights(policy.init(0, layout.param_shardings(policy)), layout)
        start = time.thread_time()
        _, report = engine.rollout(requests, FixedLayout(split))
        times.append((time.thread_time() - start) / len(report.bursts))
        engine.release_weights()
    return 1e3 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--before", type=Path, help="Python of the other checkout's environment")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--once", action="store_true", help="measure here and print it as JSON")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.once:
        print(json.dumps({live: milliseconds_per_burst(live) for live in LIVE}))
        return
    pythons = {"now": sys.executable} | ({"before": str(args.before)} if args.before else {})
    command = [__file__, "--once"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    found = {name: [] for name in pythons}
    for _ in range(args.rounds):
        for name, python in pythons.items():
            run = subprocess.run(
                [python, *command], env=environment, capture_output=True, text=True, check=True
            )
            found[name].append(json.loads(run.stdout.splitlines()[-1]))
            print(name, found[name][-1], flush=True)
    content = {
        "command": "python -m benchmarks.host_time " + " ".join(sys.argv[1:]),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "milliseconds_per_burst": {
            name: {str(n): median(run[str(n)] for run in runs) for n in LIVE}
            for name, runs in found.items()
        },
        "rounds": found,
    }
    if args.out:
        args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
