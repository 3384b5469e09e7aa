"""Rows of a program in the place of data files: the run's folder keeps them for its resumption."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from runs import SMALL_ROLLOUT, json_lines, named, write_checkpoint, write_problems

import pat_jax
from pat_jax import UserError
from pat_jax.commands import train
from pat_jax.commands.runs import data_files, with_files
from pat_jax.config.command_line import parse
from pat_jax.config.run import RunConfig
from pat_jax.run.files.folder import CONFIG_FILE, ROWS, changed_options, options_of_run
from pat_jax.run.process.open_run import OpenRun
from pat_jax.run.start.given_rows import GivenRows
from pat_jax.run.start.setup import Setup
from pat_jax.run.start.task import Task

ROWS_OF_SUMS = [{"prompt": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(24)]
OPTIONS = named(SMALL_ROLLOUT) | {"warm_start.steps": "0", "rollout.max_prompt_length": "120"}
OPTIONS |= {"eval.every": "0", "reward": "exact"}


class Dataset:
    """What is asked of one: it is no list, and goes through dictionaries."""

    column_names = ("prompt", "answer")

    def __init__(self, rows: list[dict[str, Any]]):
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, key: int) -> dict[str, Any]:
        return self._rows[key]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("rows") / "model"))


@pytest.fixture
def tasks(monkeypatch) -> list[Task]:
    """Of each run that began; none does anything but to measure one thing."""
    begun: list[Task] = []

    @contextmanager
    def begin(setup: Setup, scorer: object, signals: object, files: OpenRun) -> Iterator[None]:
        begun.append(setup.task)
        (files.folder / "metrics.jsonl").touch()
        files.close()
        yield

    monkeypatch.setattr(train, "configure", lambda count: jax.devices()[: int(count)])
    monkeypatch.setattr(train, "opened", begin)
    monkeypatch.setattr(train, "learn", lambda run: None)
    monkeypatch.setattr(train, "finish", lambda run, last: None)
    return begun


def test_rows_are_what_their_file_would_be(tasks: list[Task], model: str, tmp_path: Path):
    file = write_problems(tmp_path / "problems.jsonl", 24)
    rows = json_lines(file)
    for i, data in enumerate((str(file), rows, Dataset(rows))):
        pat_jax.train(OPTIONS, model=model, data=data, run_dir=str(tmp_path / str(i)))
    assert len(tasks) == 3
    assert len({json.dumps(task.checksums) for task in tasks}) == 1


def test_rows_to_evaluate_on_are_a_set_of_their_own(tasks: list[Task], model: str, tmp_path: Path):
    rows = [{"q": row["prompt"], "answer": row["answer"]} for row in ROWS_OF_SUMS]
    run = pat_jax.train(
        OPTIONS,
        model=model,
        data={"files": rows, "prompt_key": "q"},
        eval={"data": rows[:7], "every": 2},
        run_dir=str(tmp_path / "run"),
    )
    (task,) = tasks
    assert len(task.train.first(24)) == 24  # pyright: ignore[reportArgumentType]
    assert [(one.name, len(one.prompts)) for one in task.heldout] == [("heldout", 7)]
    assert run.config.eval.data[0].endswith("/heldout.jsonl")


def test_a_resumed_run_finds_them(tasks: list[Task], model: str, tmp_path: Path):
    folder = str(tmp_path / "run")
    run = pat_jax.train(OPTIONS, model=model, data=ROWS_OF_SUMS, run_dir=folder)
    (path,) = map(Path, run.config.data.files)
    assert path.is_absolute() and path.is_relative_to(tmp_path / "run" / ROWS)
    assert json_lines(path) == ROWS_OF_SUMS
    shell = options_of_run(["--resume", "--run_dir", folder], parse)
    assert shell.data.files == (str(path),)
    pat_jax.train(resume=True, run_dir=folder)
    pat_jax.train(resume=True, run_dir=folder, data=Dataset(ROWS_OF_SUMS))
    assert changed_options(parse(["--config", f"{folder}/{CONFIG_FILE}"]), Path(folder)) == []
    assert len({json.dumps(task.checksums) for task in tasks}) == 1
    pat_jax.train(resume=True, run_dir=folder, data=ROWS_OF_SUMS[:16])
    assert tasks[-1].checksums != tasks[0].checksums and path.is_file()


def test_options_of_config_yaml_can_be_given_again(tasks: list[Task], model: str, tmp_path: Path):
    first = pat_jax.train(OPTIONS, model=model, data=ROWS_OF_SUMS, run_dir=str(tmp_path / "1"))
    saved = yaml.safe_load((first.folder / CONFIG_FILE).read_text())
    assert saved["eval"]["data"] == []
    again = pat_jax.train(saved, run_dir=str(tmp_path / "2"))
    assert again.config == replace(first.config, run_dir=again.config.run_dir)


@pytest.mark.parametrize(
    "move", [pytest.param(Path.rename, marks=pytest.mark.slow), shutil.copytree]
)
def test_a_folder_that_lies_elsewhere_has_no_other_options(tasks, model, tmp_path, move):
    asked = {"model": model, "data": ROWS_OF_SUMS, "eval": {"data": ROWS_OF_SUMS[:7], "every": 2}}
    pat_jax.train(OPTIONS, run_dir=str(tmp_path / "old"), **asked)
    move(tmp_path / "old", tmp_path / "new")
    pat_jax.train(resume=True, run_dir=str(tmp_path / "new"))
    assert tasks[0].checksums == tasks[1].checksums
    resumed = options_of_run(["--resume", "--run_dir", str(tmp_path / "new")], parse)
    with GivenRows().placed(resumed.run_dir, data_files(resumed)) as paths:
        config = with_files(resumed, paths)
        assert changed_options(config, tmp_path / "new") == []
        for path in map(Path, (*config.data.files, *config.eval.data)):
            assert path.is_relative_to(tmp_path / "new") and path.is_file()
        others = replace(config, data=replace(config.data, files=config.eval.data))
    (changed,) = changed_options(others, tmp_path / "new")
    assert changed.startswith("data.files ")


def test_a_folder_of_another_run_gets_none(tasks: list[Task], model: str, tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="expected a new or empty folder"):
        pat_jax.train(OPTIONS, model=model, data=ROWS_OF_SUMS, run_dir=str(tmp_path / "run"))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_a_second_start_that_fails_takes_none_from_the_first(tasks, model, tmp_path, monkeypatch):
    """The second begins while the first has not written its options yet, and ends at once."""
    asked: dict[str, Any] = {"model": model, "data": ROWS_OF_SUMS, "run_dir": str(tmp_path / "run")}
    build = train.build

    def built(config: RunConfig, devices: Any) -> Any:
        monkeypatch.setattr(train, "build", build)
        with pytest.raises(UserError, match="layout"):
            pat_jax.train(OPTIONS, layout="dp7tp9", **asked)
        return build(config, devices)

    monkeypatch.setattr(train, "build", built)
    run = pat_jax.train(OPTIONS, **asked)
    assert Path(run.config.data.files[0]).is_file()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"text": "a"}] * 9, r"^data=\[\.\.\.\] has the columns text: expected one of prompt"),
        ([*ROWS_OF_SUMS, {"prompt": "?"}], r"^data=\[\.\.\.\], row 25, has no field 'answer'"),
        (
            [*ROWS_OF_SUMS, {"prompt": 3, "answer": "1"}],
            r"^data=\[\.\.\.\], row 25, field 'prompt'",
        ),
        (ROWS_OF_SUMS[:3], r"^data=\[\.\.\.\] .*fewer than one batch"),
    ],
)
def test_sentences_name_the_rows_and_leave_no_folder(tasks, model, tmp_path, rows, words: str):
    with pytest.raises(UserError, match=words) as caught:
        pat_jax.train(OPTIONS, model=model, data=rows, run_dir=str(tmp_path / "run"))
    assert str(tmp_path / "run") not in str(caught.value)
    assert list(tmp_path.iterdir()) == [] and tasks == []
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError):
        pat_jax.train(OPTIONS, model=model, data=rows, run_dir=str(tmp_path / "mine"))
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_model_without_a_tokenizer_is_one_sentence(tasks: list[Task], tmp_path: Path):
    output = r"option --data is 'data=\[\.\.\.\]', which needs a tokeni"
    with pytest.raises(UserError, match=output):
        pat_jax.train("demo", data=ROWS_OF_SUMS, run_dir=str(tmp_path / "run"))


def written(row: dict[str, Any]) -> dict[str, Any]:
    rows = GivenRows()
    name = rows.taken_from({"data": [row]})["data"]
    return json.loads(rows._rows[name][1])


@pytest.mark.parametrize("name", ["data", "files", "data.files"])
def test_rows_are_taken_from_each_name_of_the_data(name: str):
    found = GivenRows().taken_from({name: ROWS_OF_SUMS})[name]
    assert found == GivenRows().taken_from({"data": {"files": ROWS_OF_SUMS}})["data"]["files"]
    assert found.startswith(ROWS)


def test_numbers_and_arrays_are_written_as_plain_ones():
    row = {
        "prompt": "a\ud800\u2028b",
        "int": np.int64(3),
        "float": np.float32(0.5),
        "bool": np.bool_(True),
        "array": np.arange(4).reshape(2, 2),
        "jax": jnp.ones(2),
        "deep": {"list": [np.float64(1.5), (1, None)]},
    }
    found = written(row)
    assert found == {
        "prompt": "a\ud800\u2028b",
        "int": 3,
        "float": 0.5,
        "bool": True,
        "array": [[0, 1], [2, 3]],
        "jax": [1.0, 1.0],
        "deep": {"list": [1.5, [1, None]]},
    }
