"""An evaluation that is killed goes on, and nobody could tell from what it leaves."""

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from evaluations import completions, evaluate_here
from runs import finish, start, write_checkpoint, write_problems

from pat_jax.run.files.folder import lock_folder

COMMAND = ("-m", "pat_jax.evaluate")
OPTIONS = [
    *("--batch", "4", "--devices", "2", "--layout", "dp2tp1", "--max_prompt_length", "160"),
    *("--max_completion_length", "150", "--num_generations", "2", "--reward", "math"),
]


@pytest.fixture(scope="module")
def given_options(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("resumed")
    model, data = (write_checkpoint(folder / "model"), write_problems(folder / "sums.jsonl", 50))
    return [*OPTIONS, "--model", str(model), "--data", str(data)]


def kill_after(out: Path, num_lines: int, *options: str) -> None:
    """Begins an evaluation that dies with so many responses on disk, at least."""
    process, kept = start(*options, "--out", str(out), program=COMMAND), out / "responses.jsonl"
    deadline = time.monotonic() + 200
    while not (kept.exists() and kept.read_bytes().count(b"\n") >= num_lines):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def without_clock(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "results.json").read_text())
    del found["seconds"], found["tokens_per_s"], found["options"]["out"]
    return found


@pytest.mark.slow  # three evaluations
def test_a_killed_evaluation_goes_on_bit_for_bit(given_options: list[str], tmp_path: Path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(start(*given_options, "--out", str(whole), program=COMMAND))
    kill_after(killed, 20, *given_options)
    assert not (killed / "results.json").exists()
    before = (killed / "responses.jsonl").read_bytes().count(b"\n")
    assert 20 <= before < 100
    with (killed / "responses.jsonl").open("ab") as file:
        file.write(b'{"place": 99, "tok')  # as a kill in the middle of a write leaves it
    (killed / "completions.jsonl").write_text("{}\n")  # or one while completions are written
    output = finish(start("--resume", "--out", str(killed), program=COMMAND))
    assert f"{before} responses are there already" in output
    assert (killed / "completions.jsonl").read_bytes() == (whole / "completions.jsonl").read_bytes()
    assert without_clock(killed) == without_clock(whole)
    assert {path.name for path in killed.iterdir()} == {path.name for path in whole.iterdir()}
    assert len(completions(killed)) == 100


REWARD = ("--reward", "later.py:right", "--num_prompts", "4")


@pytest.fixture(scope="module")
def ended(given_options: list[str], tmp_path_factory) -> Path:
    """Where an evaluation has been ended by its reward."""
    folder = tmp_path_factory.mktemp("ended")
    (folder / "later.py").write_text("def right(completions, **columns): return 1 / 0")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        evaluate_here(patch, folder, *given_options, *REWARD)
    return folder


@pytest.fixture
def broken(ended: Path, tmp_path: Path) -> Path:
    """The folder of that evaluation."""
    shutil.copytree(ended, tmp_path, dirs_exist_ok=True)
    return tmp_path / "out"


def test_a_reward_that_ended_one_is_corrected_and_asked_for_what_is_there(
    broken: Path, monkeypatch, capsys
):
    """Nothing is generated again."""
    kept = [line["completion"] for line in completions(broken)]
    right = "def right(completions, **columns): return [len(text) for text in completions]"
    (broken.parent / "later.py").write_text(right)
    stream = "pat_jax.engine.session.Session.stream"
    monkeypatch.setattr(stream, lambda self, requests: iter(requests))
    evaluate_here(monkeypatch, broken.parent, "--resume", *REWARD, "--batch", "6", small=False)
    found = completions(broken)
    assert [line["completion"] for line in found] == kept and len(kept) == 8
    assert [line["reward"] for line in found] == [len(text) for text in kept]
    assert not (broken / "responses.jsonl").exists()
    assert "8 responses are there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--resume --seed 1", ["option --seed is 1: expected 0 with --resume"]),
        ("--resume --data.system_prompt x", ["--data.system_prompt is 'x': expected ''"]),
        ("--resume --num_prompts 5", ["option --num_prompts is 5: expected 4"]),
        ("--resume", ["{}/out", "--resume, too", "add --reward later.py:right."]),
        ("", ["expected a new or empty folder; go on with the evaluation in it with --resume"]),
        ("--resume --out {}/none", ["'{}/none': expected the folder of an evaluation"]),
        ("--resume --out {}/done", ["'{}/done': expected an evaluation to go on with", "results"]),
    ],
)
def test_what_cannot_go_on_is_one_sentence_and_keeps_what_is_there(
    broken: Path, given_options: list[str], monkeypatch, refused, options: str, words: list[str]
):
    (broken.parent / "done").mkdir()
    (broken.parent / "done" / "results.json").write_text("{}")
    argv = options.replace("{}", str(broken.parent)).split() or given_options
    message = refused(
        lambda: evaluate_here(monkeypatch, broken.parent, *argv, small=False), kept=broken
    )
    assert all(word.replace("{}", str(broken.parent)) in message for word in words), message


def test_a_folder_is_one_evaluation_at_a_time(broken: Path, monkeypatch, capsys):
    with lock_folder(broken, "another"), pytest.raises(SystemExit):
        evaluate_here(monkeypatch, broken.parent, "--resume", *REWARD, small=False)
    assert "another process is running there" in capsys.readouterr().err
