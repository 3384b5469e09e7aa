"""A reward model on preference pairs, by RewardBench's columns: its numbers, and bad input."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from evaluations import evaluate_here
from plain_model import outputs
from runs import QWEN3, write_checkpoint
from safetensors.numpy import load_file, save_file

from pat_jax.commands import evaluate_pairs
from pat_jax.common.errors import UserError
from pat_jax.evaluation.config import EvaluateConfig
from pat_jax.models.checkpoints.hf_load import check_checkpoint, load_params
from pat_jax.models.policy import Policy
from pat_jax.rl.text.scored_text import scored_tokens
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer

ROWS = [
    {"prompt": f"{i}?", "chosen": "a" * (1 + i % 7), "rejected": "b" * (1 + i % 5), "subset": kind}
    for i, kind in enumerate(["chat", "code", "chat"] * 5)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    write_checkpoint(
        folder / "judge", replace(QWEN3, num_layers=2, head="scalar", tie_embeddings=False)
    )
    write_checkpoint(folder / "policy")
    long = {"prompt": "x" * 600, "chosen": "a", "rejected": "b"}
    text = "".join(f"{json.dumps(row)}\n" for row in [*ROWS, {**long, "subset": "chat"}])
    (folder / "bench.jsonl").write_text(text)
    (folder / "more.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS[:4]))
    return folder


def rewards_of(judge: Path) -> np.ndarray:
    """Of each text alone."""
    policy, tokenizer = Policy.from_config(check_checkpoint(judge)), HuggingFaceTokenizer(judge)
    params = load_params(judge, policy, None, jnp.dtype(jnp.float32))

    def reward(prompt: str, response: str) -> float:
        return outputs(policy, params, scored_tokens(tokenizer, prompt, response))[-1]

    return np.array([[reward(x["prompt"], x[key]) for key in ("chosen", "rejected")] for x in ROWS])


def test_accuracy_by_file_and_subset(folder: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate_pairs, "configure", lambda count: jax.devices()[:count])
    monkeypatch.setattr(evaluate_pairs, "AT_ONCE", 4)
    words = ["--reward_model", str(folder / "judge"), "--devices", "2"]
    data = ["--data", str(folder / "bench.jsonl"), str(folder / "more.jsonl")]
    found = evaluate_here(monkeypatch, tmp_path, *words, *data, small=False)
    rewards = rewards_of(folder / "judge")
    is_right = rewards[:, 0] > rewards[:, 1]
    assert 0 < is_right.sum() < len(ROWS)
    bench = found["sets"]["bench"]
    assert (bench["pairs"], bench["left_out"]) == (len(ROWS), {"too_long": 1})
    assert bench["accuracy"] == pytest.approx(is_right.mean())
    assert bench["margin"] == pytest.approx(np.mean(rewards[:, 0] - rewards[:, 1]), abs=1e-5)
    for kind in ("chat", "code"):
        chosen = [row["subset"] == kind for row in ROWS]
        part = bench["subsets"][kind]
        assert part["pairs"] == sum(chosen)
        assert part["accuracy"] == pytest.approx(is_right[chosen].mean())
    both = np.concatenate([is_right, is_right[:4]])
    assert found["all"]["accuracy"] == pytest.approx(both.mean())
    printed, told = capsys.readouterr()
    assert "bench: 15 pairs; left out: 1 with more than 512 tokens" in told
    assert "bench" in printed and "  chat" in printed and "all" in printed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "{folder}/policy"}, "this model generates text; choose a reward model"),
        ({"model": "{folder}/nowhere"}, "expected the directory of a reward model"),
        ({"max_length": 513}, "--reward_model.max_length is 513: expected at most the 512 tokens"),
        ({"max_length": 5}, "bench has no pairs to evaluate (left out: 16 with more"),
    ],
)
def test_what_cannot_be_evaluated(folder: Path, options: dict, words: str, tmp_path: Path):
    default = EvaluateConfig()
    given = {"model": f"{folder}/judge", **options}
    given["model"] = given["model"].format(folder=folder)
    config = replace(
        default,
        out=str(tmp_path / "out"),
        devices=1,
        data=replace(default.data, files=(str(folder / "bench.jsonl"),)),
        reward_model=replace(default.reward_model, **given),
    )
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError) as error:
        patch.setattr(evaluate_pairs, "configure", lambda count: jax.devices()[:count])
        evaluate_pairs.evaluate_pairs(config)
    assert words in str(error.value) and not (tmp_path / "out").exists()


def test_weights_that_are_not_finite_give_no_accuracy(
    folder: Path, tmp_path: Path, monkeypatch, capsys
):
    judge = Path(shutil.copytree(folder / "judge", tmp_path / "judge"))
    tensors = load_file(judge / "model.safetensors")
    tensors["score.weight"][0, 0] = np.nan
    save_file(tensors, judge / "model.safetensors")
    monkeypatch.setattr(evaluate_pairs, "configure", lambda count: jax.devices()[:count])
    words = ["--reward_model", str(judge), "--devices", "1", "--data", str(folder / "more.jsonl")]
    with pytest.raises(SystemExit):
        evaluate_here(monkeypatch, tmp_path, *words, small=False)
    printed, told = capsys.readouterr()
    assert "accuracy" not in printed and f"{judge}/model.safetensors: tensor 'score.weight'" in told


def test_a_policy_and_a_reward_model_are_not_evaluated_at_once():
    default = EvaluateConfig()
    judge = replace(default.reward_model, model="judge")
    with pytest.raises(UserError, match="--model is 'policy': expected none with --reward_model"):
        EvaluateConfig(model="policy", reward_model=judge)
