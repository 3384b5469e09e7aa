"""Held-out nats per byte of presets that are trained from scratch on a corpus of text.

    python -m benchmarks.training.text_curves --model demo-moe --seed 0 --folder curves \\
        --data 'corpus/**/*.py'
    python -m benchmarks.training.text_curves --folder curves --out curves.json

The first command trains one preset with one seed, which several processes can do at once; begun
again it goes on. Runs of one seed see the same rows in the same order. `--times 2` doubles the
preset, which takes some seven times as long. The second command compares what is in the folder: the mean over the seeds with its 95 % interval, and the same of the
difference of each pair of presets, seed by seed.
"""

import argparse
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.report import machine, options, write
from pat_jax.common.devices import configure
from pat_jax.models.checkpoints.hf_export import export
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Policy
from pat_jax.models.presets import preset
from pat_jax.rl.text.tokenizer import NUM_BYTE_TOKENS
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.process.folder import options_of_run
from pat_jax.run.process.stop_signals import StopSignals
from pat_jax.run.sft.loop import run
from pat_jax.sft import read

# Of Student's t for 1 to 9 degrees of freedom, at 97.5 %.
T_97_5 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
SCALED = ("embed_dim", "mlp_dim", "num_layers", "num_heads", "num_kv_heads")
SCALED_OF_EXPERTS = ("num_experts", "num_experts_per_tok", "latent_dim")

Curve = Mapping[int, float]  # held-out nats per byte, by the bytes that have been learned


def scaled(name: str, times: int) -> ModelConfig:
    """A preset with bytes as tokens, and `times` its numbers and widths.

    The widths of a head and of an expert stay.
    """
    small = preset(name, vocab_size=NUM_BYTE_TOKENS)
    experts = small.experts
    if experts is not None:
        here = asdict(experts)
        experts = replace(experts, **{x: times * here[x] for x in SCALED_OF_EXPERTS if x in here})
    return replace(small, **{x: times * getattr(small, x) for x in SCALED}, experts=experts)


def train(args: argparse.Namespace) -> None:
    """One preset with one seed; writes its curve into the folder."""
    model = args.model + (f"-x{args.times}" if args.times > 1 else "")
    folder = args.folder / f"{model}-{args.seed}"
    policy, begin = Policy.from_config(scaled(args.model, args.times)), folder / "begin"
    about = machine(configure(1))
    if not begin.exists():
        export(begin, policy, policy.init(args.seed), jnp.dtype(jnp.float32))
    in_a_step = args.batch_size * (args.max_length - 1)
    steps = math.ceil(args.bytes / in_a_step)
    words = {
        "model": begin,
        "data": args.data,
        "run_dir": folder / "run",
        "resume": "auto",
        "devices": 1,
        "seed": args.seed,
        "batch_size": args.batch_size,
        "max_length": args.max_length,
        "steps": steps,
        "eval.every": max(1, steps // 10),
        "eval.num_examples": 128,  # rows
        "checkpoint.every": max(1, steps // 20),
        "optimizer.learning_rate": args.learning_rate,
        "optimizer.warmup_steps": steps // 20,
    }
    argv = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    with StopSignals() as signals:
        run(options_of_run(argv, read), signals, "sft")
    rows = read_metrics(folder / "run" / "metrics.jsonl")
    curve = {
        row["step"] * in_a_step: row["eval/bits_per_byte"] * math.log(2)
        for row in rows
        if "eval/bits_per_byte" in row
    }
    write(
        args.folder / f"{folder.name}.json",
        {
            "model": model,
            "seed": args.seed,
            "parameters": sum(math.prod(x.shape) for x in jax.tree.leaves(policy.abstract_params)),
            "nats_per_byte": curve,
            "update_seconds": sum(row.get("timing/update", 0.0) for row in rows),
            "machine": about,
        },
    )


def mean_interval(values: Sequence[float]) -> dict[str, float]:
    """The mean, and half of its 95 % interval where there are two or more."""
    count, found = len(values), {"mean": float(np.mean(values))}
    if count > 1:
        found["ci95"] = T_97_5[count - 2] * float(np.std(values, ddof=1)) / math.sqrt(count)
    return found


def compared(curves: Mapping[str, Mapping[int, Curve]]) -> dict[str, Any]:
    """Of curves by preset and seed: each preset's, and the differences of each two of them."""
    of_models = {
        model: {at: mean_interval([one[at] for one in by_seed.values()]) for at in shared(by_seed)}
        for model, by_seed in curves.items()
    }
    differences = {}
    for one, other in itertools.combinations(sorted(curves), 2):
        seeds = sorted(curves[one].keys() & curves[other].keys())
        apart = {
            seed: {
                at: curves[one][seed][at] - curves[other][seed][at]
                for at in curves[one][seed].keys() & curves[other][seed].keys()
            }
            for seed in seeds
        }
        differences[f"{one} - {other}"] = {
            at: mean_interval([x[at] for x in apart.values()]) for at in shared(apart)
        }
    return {"nats_per_byte": of_models, "differences": differences}


def shared(by_seed: Mapping[int, Curve]) -> list[int]:
    """The numbers of bytes at which every seed was evaluated."""
    return sorted(set.intersection(*map(set, by_seed.values()))) if by_seed else []


def summarize(args: argparse.Namespace) -> None:
    runs = [json.loads(path.read_text()) for path in sorted(args.folder.glob("*.json"))]
    curves: dict[str, dict[int, Curve]] = {}
    for one in runs:
        curve = {int(at): value for at, value in one["nats_per_byte"].items()}
        curves.setdefault(one["model"], {})[one["seed"]] = curve
    parameters = {one["model"]: one["parameters"] for one in runs}
    found = {"parameters": parameters, **compared(curves), "runs": runs}
    for what in ("nats_per_byte", "differences"):
        for name, by_bytes in found[what].items():
            last = max(by_bytes)
            print(f"{what} of {name} after {last:,} bytes: {by_bytes[last]}")
    write(args.out, found)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of runs and their curves")
    parser.add_argument("--model", help="preset to train; without one the curves are compared")
    parser.add_argument("--times", type=int, default=1, help="the preset's size")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", help="text to train on, as of `pat_jax.sft`")
    parser.add_argument("--bytes", type=float, default=3e6, help="to learn from")
    parser.add_argument("--batch_size", type=int, default=16, help="rows in a step")
    parser.add_argument("--max_length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    args = parser.parse_args()
    if args.model is None:
        summarize(args)
    elif args.data is None:
        parser.error("--model needs --data")
    else:
        train(args)


if __name__ == "__main__":
    main()
