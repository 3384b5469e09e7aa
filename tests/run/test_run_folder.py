"""What lies in a run's folder may be cut, missing or something else: recovered, or one sentence."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.common.errors import UserError
from pat_jax.config.command_line import dump, parse
from pat_jax.config.run import RunConfig
from pat_jax.run.checkpoints.checkpoint import Checkpointer
from pat_jax.run.checkpoints.files import CHECKPOINTS
from pat_jax.run.files.asked_again import asked_again
from pat_jax.run.files.folder import (
    CONFIG_FILE,
    LOCK_FILE,
    LOG_FILE,
    PAGE_FILE,
    ROWS,
    changed_options,
    check_run_dir,
    make_run_dir,
    options_of_run,
    saved_config,
)

TEXT = dump(RunConfig(model="tiny", seed=7))


new = partial(check_run_dir, is_resumed=False)
resumed = partial(check_run_dir, is_resumed=True)


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """A run with a checkpoint that knows the options."""
    folder = tmp_path_factory.mktemp("begun")
    with Checkpointer(folder / CHECKPOINTS) as checkpoints:
        checkpoints.save(1, {"x": jnp.zeros(3)}, {"config": TEXT})
    return folder


@given(length=st.integers(0, len(TEXT.encode()) - 1))
def test_options_that_were_cut_anywhere_come_from_the_checkpoint(begun: Path, length: int):
    (begun / CONFIG_FILE).write_bytes(TEXT.encode()[:length])
    again = parse(["--config", str(saved_config(resumed(str(begun))))])
    assert (again.model, again.seed) == ("tiny", 7)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe" + TEXT.encode(), TEXT.encode()[:-9]])
def test_without_a_checkpoint_they_are_one_sentence(tmp_path: Path, content: bytes):
    (tmp_path / CONFIG_FILE).write_bytes(content)
    with pytest.raises(UserError, match=r"config\.yaml is cut short: .* `\.\.\.`"):
        saved_config(resumed(str(tmp_path)))


@pytest.mark.parametrize(
    "name", [CONFIG_FILE, "metrics.jsonl", LOG_FILE, LOCK_FILE, "run.html", "samples.json"]
)
def test_a_folder_in_the_place_of_a_file(tmp_path: Path, name: str):
    (tmp_path / CONFIG_FILE).write_text(TEXT)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=f"expected {name} there to be a file"):
        resumed(str(tmp_path))


@pytest.mark.parametrize("name", [CHECKPOINTS, ROWS, "tensorboard"])
def test_a_file_in_the_place_of_a_folder(tmp_path: Path, name: str):
    (tmp_path / CONFIG_FILE).write_text(TEXT)
    (tmp_path / name).write_text("?")
    with pytest.raises(UserError, match=f"expected {name} there to be a folder"):
        resumed(str(tmp_path))


def test_one_process_at_a_time_writes_there(tmp_path: Path):
    folder = tmp_path / "run"
    assert new(str(folder)) == folder
    with make_run_dir(str(folder), is_resumed=False):
        for is_resumed in (False, True):
            with pytest.raises(UserError, match="another process is running there"):
                make_run_dir(str(folder), is_resumed=is_resumed)
        (folder / CONFIG_FILE).write_text(TEXT)
    assert resumed(str(folder)) == folder
    with make_run_dir(str(folder), is_resumed=True):
        pass
    with pytest.raises(UserError, match="another process has begun a run there"):
        make_run_dir(str(folder), is_resumed=False)  # as where both looked before either wrote


@pytest.fixture
def failed(tmp_path: Path) -> Path:
    """A run that had done nothing when it ended: options, log, lock, page, rows it was given."""
    (tmp_path / CONFIG_FILE).write_text(TEXT)
    for name in (LOG_FILE, LOCK_FILE, PAGE_FILE, ".config.yaml.partial"):
        (tmp_path / name).touch()
    (tmp_path / ROWS / "0123").mkdir(parents=True)
    return tmp_path


def test_a_run_that_had_done_nothing_can_be_begun_again_there(failed: Path):
    with make_run_dir(str(new(str(failed))), is_resumed=False):
        pass
    auto = ["--run_dir", str(failed), "--resume", "auto", "--seed", "8"]
    again = options_of_run(auto, parse)
    assert (again.resume, again.seed, again.model) == (False, 8, "demo")
    on = options_of_run(["--run_dir", str(failed), "--resume"], parse)
    assert (on.resume, on.seed, on.model) == (True, 7, "tiny")


@pytest.mark.parametrize(
    "words",
    [
        "--reward none --algorithm.name distill --teacher.model t",
        "--reward none --train false",
        "--reward none m:f --algorithm.reward_coef 0 --algorithm.distill_coef 1 --teacher.model t",
    ],
)
def test_a_run_without_a_reward_is_resumed_by_the_same_words(tmp_path: Path, words: str):
    argv = f"--run_dir {tmp_path} --resume auto --model m --data d {words}".split()
    begun = options_of_run(argv, parse)
    (tmp_path / CONFIG_FILE).write_text(dump(begun))
    (tmp_path / "metrics.jsonl").touch()
    assert options_of_run(argv, parse) == replace(begun, resume=True)


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints", "unfinished", "notes.txt"])
def test_what_a_run_or_a_person_has_left_is_not_written_over(failed: Path, name: str):
    (failed / name).touch() if "." in name else (failed / name).mkdir()
    with pytest.raises(UserError, match="expected a new or empty folder"):
        new(str(failed))
    with pytest.raises(UserError, match="another process has begun a run there"):
        make_run_dir(str(failed), is_resumed=False)
    assert options_of_run(["--run_dir", str(failed), "--resume", "auto"], parse).resume


def test_options_that_no_run_wrote_are_not_written_over(failed: Path):
    for text, has_log in (("model: tiny  # my own\n", True), (TEXT[:-4], True), (TEXT, False)):
        (failed / CONFIG_FILE).write_text(text)
        if not has_log:
            (failed / LOG_FILE).unlink()
        with pytest.raises(UserError, match="expected a new or empty folder"):
            new(str(failed))


def test_what_is_asked_for_anew_is_named(tmp_path: Path):
    before = RunConfig(model="tiny", seed=7)
    (tmp_path / CONFIG_FILE).write_text(dump(before))
    now = replace(before, seed=8, optimizer=replace(before.optimizer, learning_rate=0.5))
    now = replace(now, run_dir=str(tmp_path), resume=True)
    changes = changed_options(now, tmp_path)
    assert changes == ["seed 7 -> 8", "optimizer.learning_rate None -> 0.5"]
    assert changed_options(replace(now, resume=False), tmp_path) == []
    assert json.dumps(changes)


OPEN = [
    "mine.py:score",
    "/somewhere/else.py:score",
    "os:system",
    "http://127.0.0.1:9/score",
    "HTTPS://h/score",
]


@pytest.mark.parametrize("reward", OPEN)
@pytest.mark.parametrize("resume", [["--resume"], ["--resume", "auto"]])
def test_no_code_and_no_address_is_taken_from_a_folder(tmp_path, reward: str, resume: list[str]):
    """Which may be from somebody else."""
    config = parse(["--preset", "demo", "--reward", "exact", reward])
    (tmp_path / CONFIG_FILE).write_text(dump(config))
    (tmp_path / "metrics.jsonl").touch()
    argv = [*resume, "--run_dir", str(tmp_path)]
    with pytest.raises(UserError, match=r"add --reward exact .*\.$") as error:
        options_of_run(argv, parse)
    assert reward in str(error.value) and str(tmp_path) in str(error.value)
    asked = ["--reward", "exact", reward]
    assert asked_again(config) == asked
    assert options_of_run([*argv, *asked], parse).reward == config.reward
    assert options_of_run([*argv, "--reward", "math"], parse).reward == ("math",)


def test_no_loss_is_taken_from_a_folder(tmp_path: Path):
    own = ["--algorithm.loss", "mine.py:Loss"]
    config = parse(["--preset", "demo", *own, "--algorithm.name", "dapo"])
    (tmp_path / CONFIG_FILE).write_text(dump(config))
    argv = ["--resume", "--run_dir", str(tmp_path)]
    with pytest.raises(UserError, match=r"add --algorithm\.loss mine\.py:Loss\.$"):
        options_of_run(argv, parse)
    assert asked_again(config) == own
    assert options_of_run([*argv, *own], parse).algorithm == config.algorithm
    assert options_of_run([*argv, "--algorithm.loss", ""], parse).algorithm.loss == ""
    sent = replace(config, algorithm=replace(config.algorithm, loss="/a/0123.loss:Loss"))
    assert asked_again(sent) == []  # refused where it is not this user's


@pytest.mark.parametrize("reward", ["auto", "exact", "math", "model:judge", "model:a/b:c"])
def test_what_runs_no_code_is_taken_from_a_folder(tmp_path: Path, reward: str):
    shipped = f"{tmp_path}/0123.reward:score"  # refused where it is not this user's
    config = parse(["--preset", "demo", "--reward", reward, shipped])
    (tmp_path / CONFIG_FILE).write_text(dump(config))
    assert options_of_run(["--resume", "--run_dir", str(tmp_path)], parse).reward == config.reward
    assert asked_again(config) == []
