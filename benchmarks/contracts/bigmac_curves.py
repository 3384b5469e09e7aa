"""Learning from text from scratch: BigMac against the fine-grained form, with equal parameters.

    python -m benchmarks.contracts.bigmac_curves --corpus FOLDER --work DIR --out FILE

Both begin with random weights and see the same bytes in the same order, by `python -m pat_jax.sft`.
Four layers of 256, 16 experts, 4 of them for a token; bytes are tokens. The curves are the loss on
held-out text, in nats of a byte.
"""

import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import jax.numpy as jnp

from benchmarks.report import machine, options, write
from pat_jax.models.checkpoints.hf_export import export
from pat_jax.models.config import ExpertsConfig, ModelConfig
from pat_jax.models.policy import Policy
from pat_jax.run.logging.metrics import read_metrics

_BASE = ModelConfig(
    "qwen3_moe", 257, 256, 1024, 4, 8, 4, head_dim=32, qk_norm=True, tie_embeddings=True
)
FORMS = {
    "fine-grained": replace(_BASE, experts=ExpertsConfig(16, 4, 128)),
    "bigmac": replace(
        _BASE, architecture="bigmac", experts=ExpertsConfig(16, 4, 501, latent_dim=64)
    ),
}
# Two-sided 95 % of Student's t, by the number of seeds less one.
T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78}


def curve(args: Namespace, form: str, seed: int) -> dict[int, float]:
    """Loss on held-out text by step."""
    begun, run = (args.work / f"{form}-{seed}-{name}" for name in ("begun", "run"))
    if not begun.exists():
        policy = Policy.from_config(FORMS[form])
        export(begun, policy, policy.init(seed), jnp.float32)
    asked = {
        "model": begun,
        "data": args.corpus,
        "run_dir": run,
        "seed": seed,
        "steps": args.steps,
        "batch_size": args.batch_size,
        "max_length": args.max_length,
        "eval.every": max(1, args.steps // 20),
        "optimizer.learning_rate": args.learning_rate,
    }
    words = [word for name, value in asked.items() for word in (f"--{name}", str(value))]
    subprocess.run([sys.executable, "-m", "pat_jax.sft", *words], check=True)
    rows = read_metrics(run / "metrics.jsonl")
    return {row["step"]: row["eval/loss"] for row in rows if "eval/loss" in row}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--corpus", required=True, help="folder of text files")
    parser.add_argument("--work", type=Path, required=True, help="new folder for models and runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch_size", type=int, default=64, help="rows of a step")
    parser.add_argument("--max_length", type=int, default=256, help="bytes of a row")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    args = parser.parse_args()
    curves = {form: {seed: curve(args, form, seed) for seed in args.seeds} for form in FORMS}
    ends = {form: [list(of.values())[-1] for of in curves[form].values()] for form in FORMS}
    more = [b - a for a, b in zip(ends["fine-grained"], ends["bigmac"], strict=True)]
    interval = None
    if (others := len(more) - 1) in T_95:
        interval = T_95[others] * stdev(more) / len(more) ** 0.5
    for form, losses in ends.items():
        print(f"{form:13}", " ".join(f"{loss:.4f}" for loss in losses), "nats a byte")
    print(f"BigMac more   {fmean(more):+.4f} nats", f"± {interval:.4f}" if interval else "")
    seen = args.steps * args.batch_size * args.max_length
    write(args.out, {**machine(), "bytes": seen, "curves": curves, "more": more, "ci95": interval})


if __name__ == "__main__":
    main()
