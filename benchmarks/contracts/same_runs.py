"""Holds short runs of every kind against those of an older checkout, bit for bit.

    python -m benchmarks.contracts.same_runs --before ../before --out same_runs.json

Both checkouts run the same commands with `--deterministic` in a process of their own. All metrics but
the clock's readings and all exported weights must be the same: a change of structure changes neither.
An option that one of them lacks ends it with that checkout's sentence.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.contracts.kills import OPTIONS
from benchmarks.report import machine, options, write
from pat_jax.common.devices import configure
from tests.runs import QWEN3, write_checkpoint, write_problems

HERE = Path(__file__).parents[2]
CLOCKS = ("time", "tokens_per_s", "seconds", "timing/", "mfu")
STEPS = ("--steps", "3")
SUMS = (
    *(
        "--model",
        "FOLDER/vocab",
        "--data",
        "FOLDER/sums.jsonl",
        "--rollout.max_prompt_length",
        "160",
    ),
    *("--warm_start.steps", "0", "--rollout.min_length", "256"),
)
ALL_ROLES = (
    *(
        *SUMS,
        "--algorithm.name",
        "ppo",
        "--rollout.num_generations",
        "1",
        "--algorithm.beta",
        "0.05",
    ),
    *("--rollout.prompts_per_step", "8", "--reward", "model:FOLDER/scalar"),
)
CASES: Mapping[str, Sequence[str]] = {
    "grpo": (),
    "ppo, reference, reward model": ALL_ROLES,
    "ppo, separate": (*ALL_ROLES, "--placement", "separate", "--devices", "4"),
    "distillation": (
        *(*SUMS, "--teacher.model", "FOLDER/vocab", "--algorithm.name", "distill"),
        *("--reward", "math"),
    ),
    "lora": ("--lora.rank", "4", "--algorithm.beta", "0.05"),
    "experts": ("--model", "tiny-moe"),
}


def outcome(checkout: Path, words: Sequence[str]) -> dict[str, Any]:
    """Metrics and digests of exported files of one run."""
    with tempfile.TemporaryDirectory() as folder:
        run, out = Path(folder) / "run", Path(folder) / "out"
        every = [
            *OPTIONS,
            *STEPS,
            *words,
            "--run_dir",
            str(run),
            "--checkpoint.export_dir",
            str(out),
        ]
        environment = os.environ | {"PYTHONPATH": str(checkout.resolve())}
        done = subprocess.run(
            [sys.executable, "-m", "pat_jax.train", *every],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{checkout}: {' '.join(every)}\n{done.stdout}\n{done.stderr}")
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        metrics = [
            {k: v for k, v in row.items() if not any(clock in k for clock in CLOCKS)}
            for row in rows
        ]
        files = sorted(out.rglob("*.safetensors"))
        digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
        return {"metrics": metrics, "weights": digests}


def differing(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Names of what is not the same; metrics that only one of the two has are named, too."""
    found = set() if now["weights"] == before["weights"] else {"weights"}
    for ours, theirs in zip(now["metrics"], before["metrics"], strict=True):
        names = ours.keys() | theirs.keys()
        found |= {name for name in names if ours.get(name) != theirs.get(name)}
    return sorted(found)


def make_files(folder: Path) -> None:
    """A reward model, a policy that is its own teacher, and problems."""
    write_checkpoint(folder / "vocab")
    write_checkpoint(folder / "scalar", replace(QWEN3, head="scalar", tie_embeddings=False))
    write_problems(folder / "sums.jsonl")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--before", type=Path, required=True, help="checkout to compare with")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    args = parser.parse_args()
    about, found = machine(configure(1)), {}
    with tempfile.TemporaryDirectory() as folder:
        make_files(Path(folder))
        for case in args.cases:
            words = [word.replace("FOLDER", folder) for word in CASES[case]]
            now, before = outcome(HERE, words), outcome(args.before, words)
            found[case] = differing(now, before)
            print(f"{case}: {', '.join(found[case]) or 'the same'}", flush=True)
            write(args.out, {"machine": about, "differing": found})


if __name__ == "__main__":
    main()
