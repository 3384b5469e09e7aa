"""Pictures of rollouts, and a run read back from the files of its folder."""

import json
import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import numpy as np
import pytest
from pages import words_of
from traces import SWITCH, TRACE

from pat_jax.common.errors import UserError
from pat_jax.common.html.charts import Line, Plot
from pat_jax.common.html.figure import LETTER, Figure
from pat_jax.common.json_text import of_json
from pat_jax.config.command_line import dump, parse
from pat_jax.engine.executor import Collected
from pat_jax.engine.record.plot import draw_rollout, plot_rollout
from pat_jax.engine.record.report import RolloutReport
from pat_jax.engine.record.trace import DraftTrace, Move, RolloutTrace
from pat_jax.engine.sequences.prefill_calls import Copies
from pat_jax.planning.draft_counts import NONE_DRAFTED, DraftResult
from pat_jax.planning.types import BurstResult, DraftPrediction, Split
from pat_jax.run.logging.metrics import MetricsWriter
from pat_jax.run.logging.page.curves import draw_curves
from pat_jax.run.logging.page.run_page import RunPage
from pat_jax.run.logging.samples import Sample
from pat_jax.run.results.saved_run import SavedRun


def svg_of(figure: Figure) -> Element:
    return ElementTree.fromstring(figure.svg())


def all_of(picture: Element, tag: str) -> list[Element]:
    return [*picture.iter(f"{{http://www.w3.org/2000/svg}}{tag}")]


def curve(plot: Plot) -> Line:
    """The one without a name."""
    (line,) = (line for line in plot.lines if not line.name)
    return line


def test_the_picture_shows_bands_switches_and_live_sequences(tmp_path: Path):
    plot_rollout(TRACE, tmp_path / "deep" / "rollout.svg")
    picture = ElementTree.parse(tmp_path / "deep" / "rollout.svg").getroot()
    assert picture.get("width") == "920"
    words = [text.text for text in all_of(picture, "text") if text.get("class") == "name"]
    assert words == ["prefill", "dp2tp1", "dp1tp2"]
    (plot,) = draw_rollout(TRACE).plots
    spans = [(band.left, band.right) for band in plot.bands]
    assert spans == [(0, 0.25), (0.25, 1.5), (1.5, 4.0), (1.25, 1.3125)]
    assert plot.marks == [1.25]
    assert curve(plot).points == [(0.25, 0), (0.25, 100), (1.5, 40), (2.5, 9), (4.0, 0)]
    assert told(TRACE) == [
        "1: dp2tp1 to dp1tp2 at 40 running, migrate KV, 3 MiB moved; cost 62.5 ms (predicted 125 ms), "
        "predicted saving 1.5 s"
    ]
    assert told(TRACE)[0] in words_of(picture)


def told(trace: RolloutTrace) -> list[str]:
    """The lines under the picture."""
    return [*draw_rollout(trace).told]


@pytest.mark.parametrize("switches", [(), (SWITCH,)])
def test_a_computed_picture_says_so_beside_its_title(switches: tuple[Move, ...]):
    trace = replace(TRACE, moves=switches, total_steps=1_234_567, running=(2048, 1000, 4))
    for is_computed in (False, True):
        (box,) = draw_rollout(replace(trace, is_computed=is_computed)).boxes
        assert box.plot.note == "computed, not measured" * is_computed
        assert LETTER * len(f"{box.plot.title}{box.plot.note}") < box.width


def test_the_curve_falls_where_sequences_end(tmp_path: Path):
    trace = replace(TRACE, running=(3, 2, 1), done_after=(32, 128, 148))
    plot_rollout(trace, tmp_path / "rollout.svg")
    (plot,) = draw_rollout(trace).plots
    assert curve(plot).points == [(0.25, 0), (0.25, 3), (0.875, 2), (2.5, 1), (3.4375, 0)]
    assert of_json(RolloutTrace, json.loads((tmp_path / "rollout.json").read_text())) == trace


def test_a_rollout_without_bursts_or_switches_is_drawn_too(tmp_path: Path):
    plot_rollout(replace(TRACE, moves=()), tmp_path / "no-switch.svg")
    plot_rollout(RolloutTrace((), (), (), (), 0.0, 0), tmp_path / "empty.svg")
    assert (tmp_path / "empty.svg").exists()


def test_the_path_begins_where_the_prompts_were_prefilled():
    assert TRACE.path == ["dp2tp1", "dp1tp2"]
    at_once = replace(SWITCH, step=0, running=100)
    left = replace(TRACE, layout=("dp1tp2",) * 3, moves=(at_once,))
    assert left.path == ["dp2tp1", "dp1tp2"]
    assert replace(left, moves=()).path == ["dp1tp2"]
    assert RolloutTrace((), (), (), (), 0.0, 0).path == []


def test_a_trace_with_entries_missing_is_refused():
    with pytest.raises(ValueError, match="one entry for each burst"):
        replace(TRACE, running=(1, 2))


def test_drafts_are_a_curve_of_their_own():
    """What a sequence said in a step, burst by burst; none where nothing was drafted."""
    assert len(draw_rollout(replace(TRACE, drafts=DraftTrace((1.0, 1.0, 1.0)))).plots) == 1
    running, drafts = draw_rollout(replace(TRACE, drafts=DraftTrace((1.0, 1.8, 2.5)))).plots
    assert curve(running).points == [(0.25, 0), (0.25, 100), (1.5, 40), (2.5, 9), (4.0, 0)]
    assert curve(drafts).points == [(0.25, 1.0), (1.5, 1.8), (2.5, 2.5), (4.0, 2.5)]


DRAFTS = DraftTrace(
    tokens_per_step=(1.0, 1.5, 3.0),
    drafted=(0, 24, 40),
    accepted=(0, 10, 20),
    # Of each burst, from own text, siblings and earlier responses: verified, accepted, on branches.
    by_source=(
        ((0, 0, 0),) * 3,
        ((20, 8, 1), (4, 2, 0), (0, 0, 0)),
        ((20, 5, 0), (0, 0, 0), (20, 15, 2)),
    ),
    saving_s=0.75,
    predicted_saving_s=1.25,
)
DRAFTED = replace(TRACE, drafts=DRAFTS)


def test_tokens_of_drafts_are_areas_by_what_they_are_from():
    """Between one token a step and what was said, one on the other."""
    _, drafts = draw_rollout(DRAFTED).plots
    own, siblings, earlier, _ = drafts.lines
    assert [line.name for line in drafts.lines if line.name] == [*drafts.colours]
    assert [*drafts.colours] == ["own text", "siblings", "earlier responses"]
    bursts = [(0.25, 1.5), (1.5, 2.5), (2.5, 4.0)]
    for line, low, high in (
        (own, [1, 1, 1], [1, 1.4, 1.5]),  # 8 of 10 tokens, that were half a token a step
        (siblings, [1, 1.4, 1.5], [1, 1.5, 1.5]),
        (earlier, [1, 1.5, 1.5], [1, 1.5, 3]),
    ):
        corners = zip(bursts, low, high, strict=True)
        expected = [(x, below, above) for ends, below, above in corners for x in ends]
        assert [*line.interval] == [pytest.approx(corner) for corner in expected]
        assert [y for _, y in line.points] == pytest.approx([*high, high[-1]])


def test_a_report_hands_on_what_each_burst_drafted(tmp_path: Path):
    report = RolloutReport()
    for i, (tokens, row_steps) in enumerate([(40, 40), (30, 20), (30, 10)]):
        by_source = np.array(DRAFTS.by_source[i])
        begun, tried, right, branch_counts, *_ = NONE_DRAFTED
        drafted = DraftResult(begun, tried, right, branch_counts, DRAFTS.drafted[i], by_source)
        ran = BurstResult(Split(2, 1), 4, 64, 8, 100, 10, 1.0, num_draft_tokens=3)
        nobody = np.zeros(0, int)
        nothing = Copies(nobody, nobody, nobody)
        done = Collected(10, tokens, row_steps, drafted, 100, nobody, nothing)
        report.add_burst(ran, float(i), done, None)
    assert report.trace.drafts.saving_s is None  # no planner has priced them
    predicted = DraftPrediction(tokens=2.0, step_s=0.1, plain_s=0.15)
    report.drafts.add(ran, predicted, 3.0)
    drafts = report.trace.drafts
    assert replace(drafts, saving_s=0.75, predicted_saving_s=1.25) == DRAFTS
    assert (report.drafted, report.accepted) == (64, 30)
    assert report.by_source == [[40, 13, 1], [4, 2, 0], [20, 15, 2]]
    assert drafts.predicted_saving_s == pytest.approx(10 * (2 * 0.15 - 0.1))
    assert drafts.saving_s == pytest.approx(10 * 3 * 0.15 - 1.0)
    assert of_json(RolloutTrace, json.loads(report.trace.to_json())) == report.trace


OF_TWO_BURSTS = RolloutTrace((0.0, 1.0), (0, 8), (4, 2), ("dp2tp1", "dp1tp2"), 2.0, 16)
SAMPLE = Sample("1+1=", "<b>2", 1.0, 2, "stop")


@pytest.fixture
def saved(tmp_path: Path) -> SavedRun:
    (tmp_path / "config.yaml").write_text(dump(parse(["--preset", "demo", "--steps", "3"])))
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(0, {"eval/reward": 0.25})
        for step in (1, 2, 3):
            row = {"reward/mean": step / 4, "train/loss": math.nan, "timing/rollout": 1}
            metrics.write(step, row)
        metrics.samples(1, [SAMPLE])
    return SavedRun(tmp_path)


def test_it_has_what_the_run_wrote(saved: SavedRun):
    assert (saved.config.steps, saved.config.rollout.min_rows) == (3, 64)
    assert [row["step"] for row in saved.metrics] == [0, 1, 2, 3]
    assert dict(saved.samples) == {1: [SAMPLE]}
    assert "reward 0.250 -> 0.750" in repr(saved) and str(saved.folder) in repr(saved)
    assert "<td" in saved.samples._repr_html_() and "&lt;b&gt;2" in saved.samples._repr_html_()
    with pytest.raises(UserError, match=r"rollout\.json is not there"):
        _ = saved.rollout
    plot_rollout(OF_TWO_BURSTS, saved.folder / "rollout.svg")
    assert saved.rollout == OF_TWO_BURSTS


def test_curves_are_of_what_was_measured(saved: SavedRun):
    drawn = [{line.name: line for line in plot.lines} for plot in saved.plot().plots]
    panels = [{"reward/mean", "eval/reward"}, {"train/loss"}, {"rollout"}]
    assert [set(panel) for panel in drawn] == panels
    assert drawn[0]["reward/mean"].points == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert [len(plot.lines) for plot in saved.plot("reward/mean", "eval/reward").plots] == [1, 1]
    with pytest.raises(UserError, match="has no metric 'reward/men'"):
        saved.plot("reward/men")
    assert draw_curves([]).svg()  # of a run that has just begun


@pytest.mark.parametrize("draw", [SavedRun.plot, SavedRun.plot_rollout])
def test_figures_show_themselves_in_a_cell(saved: SavedRun, draw):
    plot_rollout(OF_TWO_BURSTS, saved.folder / "rollout.svg")
    picture = draw(saved)._repr_svg_()
    assert ElementTree.fromstring(picture).tag.endswith("svg") and len(picture) < 50_000


def test_the_rollouts_of_its_page_are_drawn_by_name(saved: SavedRun):
    with pytest.raises(UserError, match="rollout is 'first': expected one of none yet in"):
        saved.plot_rollout("first")
    with (page := RunPage(saved.folder)).kept(0):
        page.rollout(1, OF_TWO_BURSTS)
        page.rollout(2, replace(OF_TWO_BURSTS, total_s=3.0))
    steps = {name: one.step for name, one in saved.rollouts.items()}
    assert steps == {"first": 1, "slowest": 2, "newest": 2}
    for name, seconds in (("first", 2), ("slowest", 3)):
        (plot,) = saved.plot_rollout(name).plots
        assert f"in {seconds} s" in plot.title


def test_a_folder_without_a_run_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"has no config\.yaml: expected the folder of a run"):
        SavedRun(tmp_path)
