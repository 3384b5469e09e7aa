"""Mistakes in learning from pairs: one sentence, exit code 2, nothing compiled and nothing written."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from runs import QWEN3, write_checkpoint

from pat_jax import reward_model, sft
from pat_jax.common.run_command import run_command
from pat_jax.run.sft import loop as body

REWARD_MODEL, DPO = "reward_model", "sft --loss dpo"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    write_checkpoint(folder / "model")
    write_checkpoint(folder / "judge", replace(QWEN3, head="scalar", tie_embeddings=False))
    rows = [{"prompt": f"Say {i}.", "chosen": f"{i}", "rejected": "no"} for i in range(40)]
    for name, row in (
        ("pairs", {"prompt": "a", "chosen": "b", "rejected": "c"}),
        ("without", {"prompt": "a", "chosen": "b"}),
        ("equal", {"prompt": "a", "chosen": "b", "rejected": "b"}),
        ("numbers", {"prompt": "a", "chosen": 1, "rejected": 2}),
    ):
        text = "".join(f"{json.dumps(each)}\n" for each in [*rows, row])
        (folder / f"{name}.jsonl").write_text(text)
    return folder


@pytest.fixture
def command(folder: Path, monkeypatch, refused, tmp_path) -> Callable[..., str]:
    """The sentence that the command refuses with."""

    def refuse(words: str, *options: str) -> str:
        name, *more = words.split()
        sound = ["--model", str(folder / "model"), "--data", str(folder / "pairs.jsonl")]
        sound += ["--max_length", "64", "--run_dir", str(tmp_path / "run"), "--devices", "2"]
        monkeypatch.setattr(sys, "argv", [name, *sound, *more, *options])
        monkeypatch.setattr(body, "configure", lambda count: jax.devices()[: count or 8])
        monkeypatch.setattr(body.SftRun, "run", lambda self: pytest.fail("the run began"))
        main = {"reward_model": reward_model, "sft": sft}[name].main
        return refused(lambda: run_command(main))

    return refuse


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (REWARD_MODEL, "--data {folder}/without.jsonl", "line 41, has no field 'rejected'"),
        (REWARD_MODEL, "--data {folder}/equal.jsonl", "line 41, field 'rejected', is 'b'"),
        (REWARD_MODEL, "--data {folder}/numbers.jsonl", "line 41, field 'chosen', is 1"),
        (REWARD_MODEL, "--max_length 8", "nothing to learn from (pairs: none; left out: 41 with"),
        (REWARD_MODEL, "--data.margin_key by", "--data.margin_key is 'by': "),
        (REWARD_MODEL, "--loss dpo", "--loss"),
        (REWARD_MODEL, "--center_rewards_coefficient -1", "a number from 0 to 1,000"),
        (REWARD_MODEL, "--data nowhere.jsonl", "--data is 'nowhere.jsonl': no such file"),
        (DPO, "--data {folder}/equal.jsonl", "line 41, field 'rejected', is 'b'"),
        (DPO, "--truncate", "--truncate is True: expected false with --loss dpo"),
        (DPO, "--label_smoothing 0.5", "--label_smoothing is 0.5: expected a number in [0, 0.5)"),
        (DPO, "--model {folder}/judge", "a reward model or critic, has one number for each token"),
        ("sft", "--beta 0.2", "--beta is 0.2: expected 0.1 with --loss cross_entropy"),
        ("sft", "", "or text; a policy learns from pairs with --loss dpo"),
    ],
)
def test_options_and_files(command, folder: Path, name: str, options: str, words: str):
    assert words in command(name, *options.format(folder=folder).split())
