"""A whole run compiles nothing once its first iteration has begun, whatever it learns by."""

from pathlib import Path

import jax
import pytest
from compilations import counted_in_iterations
from runs import TINY, run_to_end

from pat_jax.config.command_line import parse
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.start.setup import build

# One in two responses is right, by its length: some groups teach, and some are drawn anew.
BY_LENGTH = """
def score(prompts, completions, **columns):
    return [float(len(text) % 2) for text in completions]
"""


@pytest.mark.slow  # each compiles a trainer and an engine
@pytest.mark.parametrize(
    "learning",
    [
        ("--algorithm.name", "dapo"),
        ("--algorithm.name", "gspo", "--algorithm.num_iterations", "2", "--algorithm.beta", "0.01"),
        ("--scan_layers", "true", "--algorithm.name", "dr_grpo"),
    ],
    ids=lambda options: options[1],
)
def test_iterations_compile_nothing(learning: tuple[str, ...], tmp_path: Path):
    (tmp_path / "reward.py").write_text(BY_LENGTH)
    switches = ["--layout", "dp1tp2@7"]
    reward = ["--reward", f"{tmp_path / 'reward.py'}:score", "--rollout.burst_steps", "8"]
    reward += ["--warm_start.steps", "0"]
    folder = ["--run_dir", str(tmp_path / "run"), "--checkpoint.every", "2", "--steps", "4"]
    config = parse([*TINY, *switches, *reward, *folder, *learning])
    setup = build(config, jax.devices()[:2])
    with counted_in_iterations() as compiled:
        run_to_end(setup)
    assert compiled == []
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    iterations = [row for row in rows if "train/loss" in row]
    assert len(iterations) == 4 and sum(row["rollout/switches"] for row in iterations) >= 3
    if "dapo" in learning:
        assert max(row["rollout/batches"] for row in iterations) > 1
