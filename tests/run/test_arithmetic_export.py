"""Exports of the built-in arithmetic: the other commands read them, up to PPO with a reward model."""

from pathlib import Path

import jax
import numpy as np
import pytest
from file_runs import made, to_the_end
from row_writing import write_lines
from runs import TINY, run_to_end

from pat_jax import reward_model
from pat_jax.config.command_line import parse
from pat_jax.rl.data.arithmetic import TOKENIZER, problems, worked
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.sft.inputs import shape_of_model
from pat_jax.run.start.setup import build

PPO = "--algorithm.name ppo --rollout.num_generations 1 --rollout.prompts_per_step 8"
PAIRS = "--devices 2 --max_length 192 --batch_size 16 --steps 2 --eval.every 0"


def train(folder: Path, *words: str) -> list[dict]:
    """Runs the command's loop in this process; returns the metrics."""
    config = parse([*TINY, *PPO.split(), "--run_dir", str(folder), *words])
    run_to_end(build(config, jax.devices()[: config.devices]))
    return read_metrics(folder / "metrics.jsonl")


def learn_pairs(folder: Path, start: Path, judge: Path) -> None:
    rows = [
        {"prompt": one.text, "chosen": worked(one.text), "rejected": "#"}
        for one in problems(1, "train").first(64)
    ]
    data = write_lines(folder / "pairs.jsonl", *rows)
    words = ["--model", str(start), "--data", str(data), "--checkpoint.export_dir", str(judge)]
    words += ["--run_dir", str(folder / "pairs")]
    setup = made(*PAIRS.split(), *words, command=reward_model)
    to_the_end(setup, reward_model.COMMAND)


@pytest.mark.slow  # three runs
def test_ppo_with_a_reward_model_that_began_as_its_policy(tmp_path: Path):
    start, judge, critic = (tmp_path / name for name in ("start", "judge", "critic"))
    train(tmp_path / "first", "--steps", "0", "--checkpoint.export_dir", str(start))
    learn_pairs(tmp_path, start, judge)
    rewards = ["--reward", f"model:{judge}", "exact", "--reward_weights", "1", "0"]
    rows = train(tmp_path / "ppo", *rewards, "--critic.export_dir", str(critic))
    for row in (row for row in rows if "eval/reward" in row):
        assert row["eval/reward"] == row["eval/reward/judge"] != row["eval/reward/exact"]
    assert np.isfinite([row["critic/explained_variance"] for row in rows if row["step"]]).all()
    for folder in (start, judge, critic):
        tokenizer, shape = HuggingFaceTokenizer(folder), shape_of_model(str(folder), "scalar")
        assert tokenizer.encode(TOKENIZER.alphabet) == TOKENIZER.encode(TOKENIZER.alphabet)
        assert tokenizer.eos_ids == TOKENIZER.eos_ids and shape.vocab_size == TOKENIZER.vocab_size
