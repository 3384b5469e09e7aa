"""A run read back from the files of its folder."""

import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pat_jax.common.errors import UserError
from pat_jax.config.command_line import dump, parse
from pat_jax.engine.record.plot import plot_rollout
from pat_jax.engine.record.trace import RolloutTrace
from pat_jax.run.logging.metrics import MetricsWriter
from pat_jax.run.logging.page.curves import draw_curves
from pat_jax.run.logging.page.run_page import RunPage
from pat_jax.run.logging.samples import Sample
from pat_jax.run.results.saved_run import SavedRun

TRACE = RolloutTrace((0.0, 1.0), (0, 8), (4, 2), ("dp2tp1", "dp1tp2"), 2.0, 16)
SAMPLE = Sample("1+1=", "<b>2", 1.0, 2, "stop")


@pytest.fixture
def run(tmp_path: Path) -> SavedRun:
    (tmp_path / "config.yaml").write_text(dump(parse(["--preset", "demo", "--steps", "3"])))
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(0, {"eval/reward": 0.25})
        for step in (1, 2, 3):
            row = {"reward/mean": step / 4, "train/loss": math.nan, "timing/rollout": 1}
            metrics.write(step, row)
        metrics.samples(1, [SAMPLE])
    return SavedRun(tmp_path)


def test_it_has_what_the_run_wrote(run: SavedRun):
    assert (run.config.steps, run.config.rollout.min_rows) == (3, 64)
    assert [row["step"] for row in run.metrics] == [0, 1, 2, 3]
    assert dict(run.samples) == {1: [SAMPLE]}
    assert "reward 0.250 -> 0.750" in repr(run) and str(run.folder) in repr(run)
    assert "<td" in run.samples._repr_html_() and "&lt;b&gt;2" in run.samples._repr_html_()
    with pytest.raises(UserError, match=r"rollout\.json is not there"):
        _ = run.rollout
    plot_rollout(TRACE, run.folder / "rollout.svg")
    assert run.rollout == TRACE


def test_curves_are_of_what_was_measured(run: SavedRun):
    drawn = [{line.name: line for line in plot.lines} for plot in run.plot().plots]
    panels = [{"reward/mean", "eval/reward"}, {"train/loss"}, {"timing/rollout"}]
    assert [set(panel) for panel in drawn] == panels
    assert drawn[0]["reward/mean"].points == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert [len(plot.lines) for plot in run.plot("reward/mean", "eval/reward").plots] == [1, 1]
    with pytest.raises(UserError, match="has no metric 'reward/men'"):
        run.plot("reward/men")
    assert draw_curves([]).svg()  # of a run that has just begun


@pytest.mark.parametrize("draw", [SavedRun.plot, SavedRun.plot_rollout])
def test_figures_show_themselves_in_a_cell(run: SavedRun, draw):
    plot_rollout(TRACE, run.folder / "rollout.svg")
    picture = draw(run)._repr_svg_()
    assert ElementTree.fromstring(picture).tag.endswith("svg") and len(picture) < 50_000


def test_the_rollouts_of_its_page_are_drawn_by_name(run: SavedRun):
    with pytest.raises(UserError, match="rollout is 'first': expected one of none yet in"):
        run.plot_rollout("first")
    with (page := RunPage(run.folder)).kept(0):
        page.rollout(1, TRACE)
        page.rollout(2, replace(TRACE, total_s=3.0))
    steps = {name: one.step for name, one in run.rollouts.items()}
    assert steps == {"first": 1, "slowest": 2, "newest": 2}
    for name, seconds in (("first", 2), ("slowest", 3)):
        (plot,) = run.plot_rollout(name).plots
        assert f"in {seconds} s" in plot.title


def test_a_folder_without_a_run_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"has no config\.yaml: expected the folder of a run"):
        SavedRun(tmp_path)
