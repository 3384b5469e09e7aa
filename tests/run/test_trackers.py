"""Trackers: what they are given, what becomes of a run where they are not there or fail."""

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from runs import ROOT, finish, start

from pat_jax.common.errors import UserError
from pat_jax.config.command_line import parse
from pat_jax.config.run import RunConfig
from pat_jax.run.files.folder import METRICS_FILE
from pat_jax.run.logging.metrics import MetricsWriter, read_metrics
from pat_jax.run.logging.samples import Sample
from pat_jax.run.logging.trackers.asked_for import begin_trackers, check_trackers
from pat_jax.run.logging.trackers.tracker import Tracker

SAMPLES = [Sample("1+2=", "3", 1.0, 2, "stop"), Sample("1+2=", "4", None, 3, "length")]
# Packages of these names that write what they are told to calls.jsonl in the current folder.
FAKE = """
import json

def told(what, *args, **options):
    with open("calls.jsonl", "a") as file:
        file.write(json.dumps([what, args, options], default=lambda x: x.__dict__) + "\\n")

class Settings:
    def __init__(self, **options): self.__dict__ = options

class Table:
    def __init__(self, columns, data): self.columns, self.data = columns, data

class Config:
    def update(self, *args, **options): told("config", *args, **options)

class Run:
    config = Config()
    def log(self, *args, **options):
        told("log", *args, **options)
        if FAILS: raise ConnectionError("nobody\\nlistens")
    def finish(self): told("finish")
    def define_metric(self, *args, **options): told("define_metric", *args, **options)

def init(**options):
    told("init", **options)
    if NO_LOGIN: raise RuntimeError("No API key configured.")
    return Run()
"""


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch):
    """Both packages, which fail as they are told to."""

    def make(fails: bool = False, no_login: bool = False) -> Path:
        for name in ("wandb", "trackio"):
            source = f"FAILS, NO_LOGIN = {fails}, {no_login}\n{FAKE}"
            (tmp_path / f"{name}.py").write_text(source)
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.chdir(tmp_path)
        return tmp_path

    yield make
    for name in ("wandb", "trackio"):
        sys.modules.pop(name, None)


def configuration(folder: Path, **changes) -> RunConfig:
    (folder / "mine").mkdir(exist_ok=True)
    return replace(
        RunConfig(), run_dir=str(folder / "mine"), trackers=("wandb", "trackio"), **changes
    )


def calls(folder: Path) -> list[list]:
    return [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]


def begun(config: RunConfig) -> dict[str, Tracker]:
    names, folder, project = config.trackers, Path(config.run_dir), config.tracker_project
    return begin_trackers(names, folder, project, asdict(config), is_resumed=config.resume)


def track(config: RunConfig, output: list[str] | None = None) -> None:
    folder = Path(config.run_dir)
    trackers = begun(config)
    notify = (output if output is not None else []).append
    with MetricsWriter(folder, trackers=trackers, notify=notify) as metrics:
        metrics.write(3, {"train/loss": 0.5, "rollout/layouts": "dp2tp1"})
        metrics.samples(3, SAMPLES)
        metrics.write(4, {"train/loss": float("nan")})


def test_each_tracker_is_given_numbers_samples_and_the_options(fakes):
    folder = fakes()
    config = configuration(folder, tracker_project="sums", steps=7)
    check_trackers(config.trackers)
    track(config)
    found = calls(folder)
    wandb, trackio = (options for what, _, options in found if what == "init")
    assert (wandb["project"], wandb["name"], wandb["dir"]) == ("sums", "mine", config.run_dir)
    assert wandb["settings"] == {"console": "off"} and wandb["resume"] == "allow"
    assert (trackio["project"], trackio["name"], trackio["resume"]) == ("sums", "mine", "never")
    (options,) = (args[0] for what, args, _ in found if what == "config")
    assert options["steps"] == trackio["config"]["steps"] == 7
    assert options["algorithm"]["epsilon"] == config.algorithm.epsilon
    logged = [(args[0], options.get("step")) for what, args, options in found if what == "log"]
    assert logged[0] == ({"step": 3, "train/loss": 0.5}, None)
    assert logged[1] == ({"train/loss": 0.5}, 3)
    assert [step for _, step in logged] == [None, 3, None, 3, None, 4]
    for content, _ in logged[2:4]:
        columns = ["step", "prompt", "response", "reward", "tokens", "finish"]
        assert content["samples"]["columns"] == columns
        assert content["samples"]["data"][0] == [3, "1+2=", "3", 1.0, 2, "stop"]
    assert found[-2:] == [["finish", [], {}]] * 2


def test_a_resumed_run_goes_on_in_its_own_charts(fakes):
    folder = fakes()
    track(configuration(folder))
    track(configuration(folder, resume=True))
    other = configuration(folder)
    track(replace(other, run_dir=str(folder)))
    begun = [options for what, _, options in calls(folder) if what == "init"]
    ids = [options["id"] for options in begun if "id" in options]
    assert ids[0] == ids[1] != ids[2]
    modes = [options["resume"] for options in begun if "id" not in options]
    assert modes == ["never", "allow", "never"]


def test_a_tracker_that_fails_is_said_once_and_ends_nothing(fakes):
    folder, output = fakes(fails=True), []
    track(configuration(folder), output)
    assert output == [
        f"tracker {name} failed (ConnectionError: nobody): the run goes on, and metrics.jsonl has its metrics."
        for name in ("wandb", "trackio")
    ]
    assert [row["step"] for row in read_metrics(folder / "mine" / METRICS_FILE)] == [3, 4]
    assert [what for what, *_ in calls(folder)].count("log") == 6  # tried again


def test_a_tracker_that_cannot_begin_is_one_sentence(fakes):
    folder = fakes(no_login=True)
    output = r"RuntimeError: No API key .*wandb login.*WANDB_MODE"
    with pytest.raises(UserError, match=output) as error:
        begun(configuration(folder))
    assert "\n" not in str(error.value)


def test_a_package_that_is_not_there_is_one_sentence_before_anything_begins(tmp_path: Path):
    """In a folder that has runs of W&B, whose name is the package's."""
    name = "wandb"
    (tmp_path / "wandb").mkdir()
    hidden = "import sys\nfrom importlib.machinery import PathFinder\nfind = PathFinder.find_spec\n"
    hidden += "def nowhere(name, path=None, target=None):\n"
    hidden += "    paths = [p for p in sys.path if 'site-packages' not in p]\n"
    hidden += "    return find(name, paths if name in ('wandb', 'trackio') else path, target)\n"
    hidden += "PathFinder.find_spec = nowhere\n"
    hidden += "from pat_jax.train import main\n"
    hidden += "from pat_jax.common.run_command import run_command\n"
    program = ("-c", f"{hidden}run_command(main)")
    output = finish(
        start("--trackers", name, "--run_dir", "here", cwd=tmp_path, program=program), code=2
    )
    assert not (tmp_path / "here").exists()
    expected = f"error: option --trackers is '{name}': expected the package {name}, which is not installed; "
    assert output.strip() == expected + f"run pip install -e '.[{name}]', or leave {name} out."


@pytest.mark.parametrize("names", [["mlflow"], ["wandb", "wandb"], ["tensorboard"]])
def test_other_names_are_refused(names: list[str]):
    with pytest.raises(UserError, match=r"--trackers is '.*expected wandb or trackio, each once"):
        parse(["--trackers", *names])


# With the real packages, where they are installed. Neither asks for a network or an account.
REAL = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_trackers import RunConfig, replace, track
folder = Path(sys.argv[2])
folder.mkdir(exist_ok=True)
track(replace(RunConfig(), run_dir=str(folder), trackers=(sys.argv[1],), resume=sys.argv[3] == "again"))
"""


def real(name: str, folder: Path, resume: str, **environment: str) -> str:
    command = [sys.executable, "-c", REAL, name, str(folder), resume]
    ours = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, env=ours, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "failed" not in done.stdout, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(find_spec("wandb") is None, reason="the extra `wandb` is not installed")
def test_weights_and_biases_offline(tmp_path: Path):
    for resume in ("new", "again"):
        real("wandb", tmp_path / "mine", resume, WANDB_MODE="offline")
    records = sorted((tmp_path / "mine" / "wandb").glob("offline-run-*/*.wandb"))
    (run_id,) = {path.stem.removeprefix("run-") for path in records}
    assert run_id == (tmp_path / "mine" / "wandb_run_id").read_text()
    for name in (b"train/loss", b"tracker_project", b"samples"):
        assert name in records[0].read_bytes()


@pytest.mark.skipif(find_spec("trackio") is None, reason="the extra `trackio` is not installed")
def test_trackio_on_this_machine(tmp_path: Path):
    for resume in ("new", "again"):
        real("trackio", tmp_path / "mine", resume, TRACKIO_DIR=str(tmp_path / "trackio"))
    with closing(sqlite3.connect(tmp_path / "trackio" / "pat_jax.db")) as database:
        rows = database.execute("select step, metrics from metrics order by rowid").fetchall()
        runs = database.execute("select count(distinct run_name) from metrics").fetchone()
    assert [step for step, _ in rows] == [3, 3, 4] * 2 and runs == (1,)
    assert json.loads(rows[0][1])["train/loss"] == 0.5 and b"1+2=" in bytes(rows[1][1])
