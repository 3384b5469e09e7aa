"""Mistakes in learning from files: one sentence, exit code 2, nothing compiled and nothing written."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from runs import QWEN3, write_checkpoint, write_problems

from pat_jax import reward_model, sft
from pat_jax.common import devices
from pat_jax.common.run_command import run_command
from pat_jax.config.command_line import dump
from pat_jax.config.run import RunConfig
from pat_jax.run.checkpoints.checkpoint import Checkpointer
from pat_jax.run.checkpoints.files import CHECKPOINTS
from pat_jax.run.files.folder import CONFIG_FILE
from pat_jax.run.sft import loop as body


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A sound checkpoint directory and data files."""
    folder = tmp_path_factory.mktemp("given")
    write_checkpoint(folder / "model")
    write_problems(folder / "problems.jsonl", 24)
    rows = [{"prompt": f"Say {i}.", "completion": str(i)} for i in range(40)]
    (folder / "examples.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    pairs = [{"prompt": f"Say {i}.", "chosen": f"{i}", "rejected": "no"} for i in range(40)]
    for name, row in (
        ("pairs", {"prompt": "a", "chosen": "b", "rejected": "c"}),
        ("without", {"prompt": "a", "chosen": "b"}),
        ("equal", {"prompt": "a", "chosen": "b", "rejected": "b"}),
        ("numbers", {"prompt": "a", "chosen": 1, "rejected": 2}),
    ):
        text = "".join(f"{json.dumps(each)}\n" for each in [*pairs, row])
        (folder / f"{name}.jsonl").write_text(text)
    write_checkpoint(folder / "judge", replace(QWEN3, head="scalar", tie_embeddings=False))
    (folder / "empty").mkdir()
    (folder / "a.txt").write_text("some text")
    (folder / "blank.txt").write_text(" \n")
    (folder / "small").mkdir()
    write_checkpoint(folder / "small" / "model", replace(QWEN3, vocab_size=128))
    (folder / "small" / "model" / "tokenizer.json").unlink()
    (folder / "broken.jsonl").write_text(json.dumps(rows[0]) + '\n{"prompt": \n')
    return folder


@pytest.fixture
def command(folder: Path, monkeypatch, refused, tmp_path) -> Callable[..., str]:
    """The sentence that the command refuses with."""

    def refuse(line: str) -> str:
        name, *options = line.split()
        data = "pairs" if "dpo" in options or name == "reward_model" else "examples"
        sound = ["--model", str(folder / "model"), "--data", str(folder / f"{data}.jsonl")]
        sound += ["--max_length", "64", "--run_dir", str(tmp_path / "run"), "--devices", "2"]
        monkeypatch.setattr(sys, "argv", [name, *sound, *options])
        monkeypatch.setattr(devices, "configure", lambda count: jax.devices()[: count or 8])
        monkeypatch.setattr(body.SftRun, "run", lambda self: pytest.fail("the run began"))
        return refused(lambda: run_command({"sft": sft, "reward_model": reward_model}[name].main))

    return refuse


@pytest.mark.parametrize(
    "row",
    [
        (
            "--model nowhere",
            "--model is 'nowhere'",
            "a Hugging Face checkpoint directory",
            "tiny-moe",
        ),
        ("--data nowhere*.json", "--data is 'nowhere*.json': no such file or folder; give .json"),
        ("--data {folder}/empty", "names the folder {folder}/empty, which has no files: expected"),
        (
            "--data {folder}/model/model.safetensors",
            "model.safetensors is not UTF-8 text (byte 0x",
            "at offset",
        ),
        ("--data {folder}/blank.txt", "texts: 0 with 0 tokens; rows of 64: none; left out: 1"),
        ("--data {folder}/a.txt --eval.share 0.0001", "nothing to evaluate (texts: 1 with 10"),
        ("--data {folder}/a.txt {folder}/examples.jsonl", "a.txt, is plain text, but"),
        ("--data {folder}/a.txt --data.text_key words", "--data.text_key names a column, but"),
        ("--data {folder}/a.txt --model tiny --lora.rank 4 --lora.export adapter", "--lora.export"),
        ("--model {folder}/small/model", "has no tokenizer files", "128: expected", "257 to 512"),
        ("--data {folder}/problems.jsonl", "question, answer: expected prompt and completion"),
        ("--data {folder}/problems.jsonl --data.prompt_key question", "--data.completion_key"),
        ("--data {folder}/broken.jsonl", "{folder}/broken.jsonl, line 2", "broken JSON"),
        ("--data.text_key words", "--data.text_key is 'words'", "columns prompt, completion"),
        ("--max_length 513", "--max_length is 513", "at most the 512 tokens", "--max_length 512"),
        ("--max_length 1", "--max_length is 1", "an integer from 2"),
        ("--max_length 8", "nothing to learn from", "40 longer than 8 tokens (--max_length "),
        ("--epochs 0", "--epochs is 0.0", "a number above 0"),
        ("--eval.share 1", "--eval.share is 1.0", "a number in (0, 1)"),
        ("--eval.share 0.0001", "nothing to evaluate (examples: 40 to learn", "--eval.every 0"),
        ("--eval.data nowhere.json", "--eval.data is 'nowhere.json': no such file or folder"),
        ("--eval.data {folder}/examples.jsonl --eval.every 0", "data is", "never evaluates"),
        ("--optimizer.warmup_steps 9 --epochs 2", "at most the 4 optimizer steps of the run"),
        ("--warm_start.steps 3", "--warm_start.steps"),
        ("--data.chat_template_kwargs {{", "chat_template_kwargs is '{{'", "a JSON object"),
        ("--resume", "--run_dir is", "expected the folder of a run to resume"),
        ("--checkpoint.export_dir {folder}/model", "the directory is not empty"),
        ("--device_memory_gib 0.0001", "the update needs more than", "use more devices"),
    ],
)
def test_options_and_files(command, folder: Path, row: tuple[str, ...]):
    options, *words = row
    message = command(f"sft {options.format(folder=folder)}")
    for word in words:
        assert word.format(folder=folder) in message


REWARD_MODEL, DPO = "reward_model", "sft --loss dpo"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"{REWARD_MODEL} --data {{folder}}/without.jsonl", "line 41, has no field 'rejected'"),
        (f"{REWARD_MODEL} --data {{folder}}/equal.jsonl", "line 41, field 'rejected', is 'b'"),
        (f"{REWARD_MODEL} --data {{folder}}/numbers.jsonl", "line 41, field 'chosen', is 1"),
        (f"{REWARD_MODEL} --max_length 8", "nothing to learn from (pairs: none; left out: 41 with"),
        (f"{REWARD_MODEL} --data.margin_key by", "--data.margin_key is 'by': "),
        (f"{REWARD_MODEL} --loss dpo", "--loss"),
        (f"{REWARD_MODEL} --center_rewards_coefficient -1", "a number from 0 to 1,000"),
        (f"{REWARD_MODEL} --data nowhere.jsonl", "--data is 'nowhere.jsonl': no such file"),
        (f"{DPO} --data {{folder}}/equal.jsonl", "line 41, field 'rejected', is 'b'"),
        (f"{DPO} --truncate", "--truncate is True: expected false with --loss dpo"),
        (f"{DPO} --label_smoothing 0.5", "--label_smoothing is 0.5: expected a number in [0, 0.5)"),
        (
            f"{DPO} --model {{folder}}/judge",
            "a reward model or critic, has one number for each token",
        ),
        ("sft --beta 0.2", "--beta is 0.2: expected 0.1 with --loss cross_entropy"),
        ("sft --data {folder}/pairs.jsonl", "or text; a policy learns from pairs with --loss dpo"),
    ],
)
def test_options_and_files_of_pairs(command, folder: Path, line: str, words: str):
    assert words in command(line.format(folder=folder))


def test_data_has_to_be_given(monkeypatch, refused, folder: Path, tmp_path: Path):
    options = ["--model", str(folder / "model"), "--run_dir", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["sft", *options])
    monkeypatch.setattr(devices, "configure", lambda count: jax.devices())
    message = refused(lambda: run_command(sft.main))
    assert "option --data is not given: expected .json, .jsonl or" in message


def test_a_run_of_reinforcement_learning_is_not_gone_on_with(command, tmp_path: Path):
    run_dir = tmp_path / "run"
    with Checkpointer(run_dir / CHECKPOINTS, fingerprint={"num_layers": 2}) as checkpoints:
        checkpoints.save(1, {"x": jnp.zeros(2)}, {})
    (run_dir / CONFIG_FILE).write_text(dump(RunConfig()))
    message = command("sft --resume")
    assert str(run_dir / CONFIG_FILE) in message and "train" in message
