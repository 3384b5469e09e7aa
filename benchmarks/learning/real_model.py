"""GRPO of a real small model here and by TRL: reward over steps and over seconds.

    python tests/real/small_parts.py REAL
    python -m benchmarks.learning.real_model --model REAL/smollm2 --trl ENV/bin/python \
        --out benchmarks/results/real_model_cpu2.json

SmolLM2-135M-Instruct learns to add two numbers below thirty (`turns_reward.sums`). Three sums with their
answers precede each problem, as text without a chat template: as a chat the model adds nothing rightly,
so that there is nothing to reinforce. Both systems have the same weights, problems, reward function, batch,
number of steps, learning rate, and their own defaults otherwise; both train all parameters in float32. They run in processes of their own, one step each by turns, so that their seconds
are comparable. The problems held back are answered greedily by the model as it was and by what each
system made of it.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from scipy import stats

import pat_jax
from benchmarks.report import by_turns, machine, options, write
from benchmarks.speed.engine_vs_peers import PEERS
from benchmarks.speed.iteration_vs_peers import Iteration, Loop
from pat_jax.common.devices import configure

BELOW = 30  # both numbers of a sum
HELD_BACK = 140  # problems
SPAN = 5  # steps of a moving average
EXAMPLES = "2 + 5 = 7\n11 + 4 = 15\n8 + 9 = 17\n"  # before each problem
RESPONSE = 4  # tokens at most
LAST = 20  # steps whose mean reward is a system's outcome
REWARD = PEERS / "turns_reward.py"


@dataclass(frozen=True)
class Training(Iteration):
    """What both systems are asked for."""

    save: str = ""  # directory for the learned model
    seed: int = 0


def write_problems(folder: Path) -> tuple[Path, Path]:
    """Files of problems to learn from, and of those held back, the same for every seed."""
    pairs = [(a, b) for a in range(1, BELOW) for b in range(1, BELOW)]
    rows = []
    for a, b in np.random.default_rng(0).permutation(pairs).tolist():
        rows.append({"prompt": f"{EXAMPLES}{a} + {b} =", "answer": str(a + b)})
    files = folder / "train.jsonl", folder / "held_back.jsonl"
    for file, part in zip(files, (rows[HELD_BACK:], rows[:HELD_BACK]), strict=True):
        file.write_text("\n".join(map(json.dumps, part)))
    return files


def without_template(model: Path, folder: Path) -> str:
    """A copy of a model whose prompts are no chats."""
    ignored = shutil.ignore_patterns("chat_template*")
    return str(shutil.copytree(model, folder / "model", ignore=ignored))


def accuracy(model: str, held_back: Path, out: Path) -> float:
    """Share of the problems held back that the model answers rightly, greedily."""
    pat_jax.evaluate(
        model=model,
        data=str(held_back),
        reward=f"{REWARD}:sums",
        temperature=0.0,
        max_completion_length=RESPONSE,
        devices=1,
        out=str(out),
    )
    responses = map(json.loads, (out / "completions.jsonl").read_text().splitlines())
    return float(np.mean([response["reward"] == 1 for response in responses]))


def trained(args: argparse.Namespace, model: str, seed: int, folder: Path) -> dict[str, dict]:
    """Rewards and seconds of every step of each system, and its accuracy afterwards."""
    data, held_back = write_problems(folder)
    saves = {name: folder / f"{name}_model" for name in ("pat_jax", "trl")}
    ours, theirs = (
        Training(
            model=model,
            data=str(data),
            prompts=4,
            generations=8,
            prompt=64,
            response=RESPONSE,
            beta=0.0,
            steps=args.steps,
            reward="sums",
            save=str(save),
            seed=seed,
        )
        for save in saves.values()
    )
    more = {"seed": seed, "checkpoint.export_dir": ours.save}
    run_dir = folder / "run"
    systems = {
        "pat_jax": Loop(Path(sys.executable), "pat_jax_grpo.py", *ours.options(1, run_dir, **more)),
        "trl": Loop(args.trl, "trl_grpo.py", json.dumps(asdict(theirs))),
    }
    seconds = by_turns(systems, range(args.steps))
    for system in systems.values():
        system.end()
    metrics = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    rewards = {
        "pat_jax": [one["reward/mean"] for one in metrics if "reward/mean" in one],
        "trl": json.loads((saves["trl"] / "rewards.json").read_text()),
    }
    return {
        name: {
            "versions": system.versions,
            "reward": np.round(rewards[name], 4).tolist(),
            "seconds": np.round(seconds[name], 3).tolist(),
            "accuracy": accuracy(str(saves[name]), held_back, folder / f"{name}_results"),
        }
        for name, system in systems.items()
    }


def band(curves: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """Mean of the seeds' moving averages, and its 95 % interval by Student's t."""
    smooth = np.array([np.convolve(curve, np.ones(SPAN) / SPAN, "valid") for curve in curves])
    mean = smooth.mean(0)
    error = stats.t.ppf(0.975, len(curves) - 1) * stats.sem(smooth, axis=0)
    found = {"mean": mean, "low": mean - error, "high": mean + error}
    return {name: np.round(values, 4).tolist() for name, values in found.items()}


def summary(seeds: dict[int, dict[str, dict]]) -> dict[str, dict]:
    """Of each system, over its seeds."""
    found = {}
    for name in ("pat_jax", "trl"):
        runs = [one[name] for one in seeds.values()]
        found[name] = {
            "reward": band([run["reward"] for run in runs]),
            "last_reward": [round(float(np.mean(run["reward"][-LAST:])), 4) for run in runs],
            "accuracy": [round(run["accuracy"], 4) for run in runs],
            "seconds_of_a_step": float(np.median([run["seconds"][1:] for run in runs])),
        }
    ratios = [np.divide(one["trl"]["seconds"], one["pat_jax"]["seconds"]) for one in seeds.values()]
    found["trl"]["times_as_long"] = [round(float(np.median(one[1:])), 3) for one in ratios]
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--model", type=Path, required=True, help="directory of SmolLM2-135M-Instruct"
    )
    parser.add_argument("--trl", type=Path, required=True, help="Python with torch and trl")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    about = machine(configure(1))
    seeds = {}
    with tempfile.TemporaryDirectory() as name:
        model = without_template(args.model, Path(name))
        (folder := Path(name, "before")).mkdir()
        before = accuracy(model, write_problems(folder)[1], folder / "results")
        for seed in args.seeds:
            with tempfile.TemporaryDirectory() as own:
                seeds[seed] = trained(args, model, seed, Path(own))
            # After each seed, so that hours are not lost.
            found = summary(seeds) if len(seeds) > 1 else {}
            about_runs = {"accuracy_before": before, "summary": found, "seeds": seeds}
            write(args.out, {"machine": about, **about_runs})


if __name__ == "__main__":
    main()
