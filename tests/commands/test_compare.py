"""The page of several runs: curves over one another, and the options that differ."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
from pages import charts_of, parsed, section_of

import pat_jax
from pat_jax import UserError
from pat_jax.common.run_command import run_command
from pat_jax.config.command_line import dump, parse
from pat_jax.config.sft import SftConfig
from pat_jax.run.logging.metrics import MetricsWriter
from pat_jax.run.results.saved_run import SavedRun

GIVEN = ["--model", "tiny", "--data", "x.jsonl"]


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two runs of `train`, one of them killed in a line, and one of `sft`."""
    found = []
    for seed in (1, 2):
        folder = tmp_path / f"seed{seed}"
        with MetricsWriter(folder) as metrics:
            for step in range(1, 4):
                row = {"reward/mean": seed * step / 8, "timing/step": 2.0, "train/loss": 0.5}
                metrics.write(step, row | ({"reward/std": 0.25} if seed == 2 else {}))
        config = parse(["--preset", "demo", "--seed", str(seed), "--run_dir", str(folder)])
        (folder / "config.yaml").write_text(dump(config))
        found.append(folder)
    with (found[1] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/me')
    with MetricsWriter(folder := tmp_path / "sft") as metrics:
        metrics.write(1, {"train/loss": 2.0, "timing/step": 1.0})
    (folder / "config.yaml").write_text(dump(parse(GIVEN, SftConfig, presets=None)))
    return [*found, folder]


def test_each_run_has_a_curve_where_it_has_the_metric(runs: list[Path], tmp_path: Path):
    found = pat_jax.compare(runs[0], SavedRun(runs[1]), str(runs[2]), out=str(tmp_path / "a.html"))
    page = found.path.read_text()
    drawn = {
        title: {line["name"]: (line["x"], line["y"]) for line in lines}
        for title, lines in charts_of(parsed(page)).items()
    }
    assert drawn["reward"] == {
        "seed1": ([1, 2, 3], [0.125, 0.25, 0.375]),
        "seed2": ([1, 2, 3], [0.25, 0.5, 0.75]),
    }
    assert [*drawn["loss"]] == ["seed1", "seed2", "sft"] and [
        *drawn["spread of the rewards, standard deviation"]
    ] == ["seed2"]
    assert "steps 3 3 1" in section_of(page, "Results")
    assert found.results["time of steps"] == {"seed1": "6 s", "seed2": "6 s", "sft": "1 s"}


def test_options_that_differ_are_beside_one_another(runs, tmp_path: Path, monkeypatch, capsys):
    out = tmp_path / "deep" / "pair.html"
    monkeypatch.setattr(sys, "argv", ["compare", str(runs[0]), "--out", str(out), str(runs[1])])
    run_command(import_module("pat_jax.compare").main)
    assert section_of(out.read_text(), "Options that differ") == (
        "Options that differ rows: 1 seed1 seed2 seed 1 2"
    )
    told = capsys.readouterr().out
    assert "seed  1      2" in told and told.endswith(f"page: {out}\n")


def test_runs_of_one_name_are_told_apart(runs: list[Path], tmp_path: Path):
    (tmp_path / "again").mkdir()
    same = runs[0].rename(tmp_path / "again" / "seed2")
    options = pat_jax.compare(same, runs[1], out=str(tmp_path / "a.html")).options
    assert options == {"seed": {str(same): "1", str(runs[1]): "2"}}


def test_a_run_in_the_folder_that_one_is_in_has_a_name(runs: list[Path], monkeypatch):
    monkeypatch.chdir(runs[0])
    assert {*pat_jax.compare(".", "../seed2").options["seed"]} == {"seed1", "seed2"}


def test_damaged_options_are_one_sentence(runs: list[Path], tmp_path: Path):
    (runs[0] / "config.yaml").write_text("steps: [")
    with pytest.raises(UserError, match=r"config\.yaml is not YAML: mend it"):
        pat_jax.compare(*runs, out=str(tmp_path / "a.html"))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([], r"option --runs is \[\]: expected the folders of two or more runs"),
        (["a", 3], "run is 3: expected the folder of a run"),
        (["a", "./seed1"], "seed1 is given twice: expected different runs"),
        (["a", "evaluated"], "evaluated has no metrics.jsonl: expected the folder of a run"),
        (["a", "elsewhere"], "elsewhere has no metrics.jsonl: expected the folder of a run"),
    ],
)
def test_what_is_no_run_is_refused_before_anything_is_written(
    runs, tmp_path: Path, monkeypatch, given, told
):
    (tmp_path / "evaluated").mkdir()
    (tmp_path / "evaluated" / "config.yaml").write_text("model: tiny")
    monkeypatch.chdir(tmp_path)
    given = [runs[0] if run == "a" else run for run in given]
    with pytest.raises(UserError, match=told):
        pat_jax.compare(*given, out=str(tmp_path / "a.html"))
    assert not (tmp_path / "a.html").exists()
