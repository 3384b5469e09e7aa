"""The reward_model command: it learns a rule, compiles nothing on the way, resumes and exports."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import assert_same_bits
from file_runs import Whole, made, stop_at, to_the_end
from metrics_table import untold
from plain_model import outputs
from row_writing import write_lines
from runs import without_times, write_checkpoint

from pat_jax import reward_model, sft
from pat_jax.models.checkpoints.hf_load import check_checkpoint, load_params
from pat_jax.models.policy import Policy
from pat_jax.rl.algorithm.preferences import agreement
from pat_jax.rl.data.examples import Pair
from pat_jax.rl.text.scored_text import scored_tokens
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.process.stop_signals import StopSignals
from pat_jax.run.sft.loop import SftRun

STEPS = 12
OPTIONS = [
    *("--devices", "2", "--max_length", "64", "--tokens_per_micro_batch", "512"),
    *("--batch_size", "16", "--steps", str(STEPS), "--eval.every", "6", "--eval.share", "0.2"),
    *("--checkpoint.every", "5", "--optimizer.learning_rate", "1e-2"),
]


def write_pairs(path: Path) -> Path:
    """The polite answer is preferred, whether it is right or not."""
    words = [("Sure", "Ugh"), ("Gladly", "Meh")]
    rows = [
        {"prompt": f"{i}+{j}?", "chosen": f"{good} {i + j}", "rejected": f"{bad} {i + j}"}
        for i in range(8)
        for j in range(8)
        for good, bad in [words[(i + j) % 2]]
    ]
    return write_lines(path, *rows)


@pytest.fixture(scope="module")
def given_options(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("given")
    model, data = write_checkpoint(folder / "model"), write_pairs(folder / "pairs.jsonl")
    return [*OPTIONS, "--model", str(model), "--data", str(data)]


@pytest.fixture(
    scope="module",
    params=[
        "reward_model",
        pytest.param("lora", marks=pytest.mark.slow),
        pytest.param("dpo", marks=pytest.mark.slow),
        pytest.param("dpo lora", marks=pytest.mark.slow),
    ],
)
def whole(given_options, tmp_path_factory, request) -> Whole:
    folder, kind = tmp_path_factory.mktemp("runs") / "whole", request.param
    options = [*given_options, "--run_dir", str(folder)]
    options += ["--checkpoint.export_dir", str(folder / "exported")]
    options += ["--lora.rank", "4"] * ("lora" in kind)
    command = sft if "dpo" in kind else reward_model
    options += ["--loss", "dpo"] * ("dpo" in kind)
    return to_the_end(made(*options, command=command), command.COMMAND)


def rewards_of(export: Path, pairs: list[Pair]) -> np.ndarray:
    """Of an exported reward model, computed one text after another."""
    model = check_checkpoint(export)
    policy = Policy.from_config(model)
    params = load_params(export, policy, None, jnp.dtype(jnp.float32))
    assert not model.head_bias
    both = [(pair.chosen.tokens, pair.rejected.tokens) for pair in pairs]
    return np.array([[outputs(policy, params, x)[-1] for x in pair] for pair in both])


def test_it_compiles_nothing_and_learns(whole: Whole):
    assert whole.compiled == []
    rows = read_metrics(whole.folder / "metrics.jsonl")
    evaluated = {row["step"]: row for row in rows if "eval/loss" in row}
    assert list(evaluated) == [0, 6, STEPS]
    first, last = evaluated[0], evaluated[STEPS]
    assert first["eval/loss"] == pytest.approx(np.log(2)) and first["eval/accuracy"] == 0
    assert last["eval/accuracy"] >= 0.95 and last["eval/loss"] < 0.4
    assert rows[-1]["train/accuracy"] >= 0.9
    assert untold({name for row in rows for name in row} - {"step", "time"}) == set()


def test_the_export_gives_the_measured_rewards(whole: Whole):
    if whole.setup.policy.config.head == "vocab":
        assert check_checkpoint(whole.folder / "exported").head == "vocab"
        return
    export, pairs = whole.folder / "exported", list(whole.setup.lessons.heldout)
    measured = read_metrics(whole.folder / "metrics.jsonl")[-1]
    found = agreement(rewards_of(export, pairs))
    for name, value in found.items():
        assert measured[f"eval/{name}"] == pytest.approx(value, rel=1e-3, abs=1e-4)
    tokenizer = HuggingFaceTokenizer(export)
    assert any(
        pair.chosen.tokens.tolist() == list(scored_tokens(tokenizer, "0+0?", "Sure 0"))
        for pair in (*whole.setup.lessons.train, *pairs)
    )


def test_a_stopped_run_goes_on_bit_for_bit(whole: Whole, tmp_path, capsys, monkeypatch):
    folder, command = tmp_path / "run", whole.setup.config
    module = reward_model if whole.setup.policy.config.head == "scalar" else sft
    monkeypatch.setattr(SftRun, "compile", lambda run: 0.0)
    setup = replace(whole.setup, config=replace(command, run_dir=str(folder)))
    stop_at(7, setup, module.COMMAND)
    again = f"go on with: python -m pat_jax.{module.COMMAND} --resume"
    assert again in capsys.readouterr().err

    resumed = made("--resume", "--run_dir", str(folder), command=module)
    run = SftRun(replace(resumed, roles=whole.setup.roles), StopSignals(), module.COMMAND)
    ended = run.learn(run.begin())
    assert_same_bits(jax.device_get(ended.state.params), whole.params)
    run.files.release()
    ours, theirs = (read_metrics(x / "metrics.jsonl") for x in (folder, whole.folder))
    assert without_times(ours) == without_times(theirs)
