"""Runs that train adapters: resumed, exported either way, gone on from; and what is refused."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import assert_same_bits
from file_runs import made, to_the_end
from row_writing import write_lines
from runs import SMALL_ROLLOUT, TINY, run, run_to_end, saved_run, write_checkpoint, write_problems

import pat_jax.reward_model as reward_model
from pat_jax.config.command_line import parse
from pat_jax.models.checkpoints.hf_load import load_params
from pat_jax.models.checkpoints.peft_adapter import load_adapter, read_adapter
from pat_jax.rl.data.arithmetic import TOKENIZER, problems, worked
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.sft.inputs import shape_of_model
from pat_jax.run.start.setup import build

LORA = ["--lora.rank", "4", "--optimizer.learning_rate", "0.01"]


@pytest.mark.slow  # whole commands
def test_a_run_trains_adapters_alone_and_is_resumed_on_its_own_base(tmp_path: Path):
    folder, others = tmp_path / "run", ("--steps", "4")
    run(*TINY, *LORA, "--run_dir", str(folder), "--rollout.check_integrity", "true")
    setup, state, step = saved_run(folder)
    assert step == 2 and set(state.params) == set(setup.trainer.trained.lora.modules)  # pyright: ignore[reportOptionalMemberAccess]
    assert all(np.asarray(adapter.b).any() for adapter in state.params.values())
    shutil.copytree(folder, tmp_path / "copy")

    output = run("--resume", "--run_dir", str(folder), *others)
    assert "resumed after step 2" in output and "step 4/4" in output
    rows = read_metrics(folder / "metrics.jsonl")
    gaps = [row["train/transfer_gap"] for row in rows if "train/transfer_gap" in row]
    assert len(gaps) == 4 and max(gaps) < 1e-4

    again = ["--resume", "--run_dir", str(tmp_path / "copy"), *others]
    output = run(*again, "--seed", "7", code=2)
    assert "are of another base" in output and "Traceback" not in output
    output = run(*again, "--lora.rank", "8", code=2)
    assert "lora.rank (4 there, 8 here)" in output and "Traceback" not in output


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return write_checkpoint(folder / "base"), write_problems(folder / "sums.jsonl")


@pytest.mark.slow  # whole commands
def test_what_is_exported_is_what_was_trained(tmp_path: Path, checkpoint: tuple[Path, Path]):
    """Merged, or the adapters alone, from which another run goes on."""
    base, problems = checkpoint
    options = [
        *SMALL_ROLLOUT, "--model", str(base), "--data", str(problems),
        *("--rollout.max_prompt_length", "256", "--reward", "math"),
    ]  # fmt: skip
    merged, adapter = tmp_path / "merged", tmp_path / "adapter"
    run(*options, *LORA, "--run_dir", str(tmp_path / "one"), "--checkpoint.export_dir", str(merged))
    setup, state, _ = saved_run(tmp_path / "one")
    lora, policy = setup.trainer.trained.lora, setup.policy
    assert lora
    wanted = lora.merge(load_params(base, policy, None, jnp.float32), jax.device_get(state.params))
    found = load_params(merged, policy, None, jnp.float32)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)

    run(
        "--resume", "--run_dir", str(tmp_path / "one"), "--lora.export", "adapter",
        "--checkpoint.export_dir", str(adapter),
    )  # fmt: skip
    content = json.loads((adapter / "adapter_config.json").read_text())
    assert content["base_model_name_or_path"] == str(base.absolute())
    known = read_adapter(adapter, policy)
    assert (known.rank, known.alpha, known.modules) == (4, 8.0, lora.modules)
    assert_same_bits(load_adapter(adapter, known), jax.device_get(state.params))

    still = ["--lora.adapter", str(adapter), "--steps", "1", "--optimizer.learning_rate", "0"]
    run(*options, *still, "--run_dir", str(tmp_path / "two"))
    _, begun, _ = saved_run(tmp_path / "two")
    assert_same_bits(begun.params, state.params)


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
    to_the_end(setup)


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
