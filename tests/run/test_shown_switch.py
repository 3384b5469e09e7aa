"""The same rollout twice: what is kept of it, said of it and shown on the page."""

from dataclasses import replace
from pathlib import Path

import pytest
from pages import section_of
from traces import SWITCH, TRACE

from pat_jax.common.errors import UserError
from pat_jax.engine.record.plot import draw_rollouts
from pat_jax.run.files.shown_switch import (
    SWITCH_FILE,
    ComputedPlan,
    ShownSwitch,
    read_switch,
    write_switch,
)
from pat_jax.run.logging.page.run_page import run_page

FORCED_SWITCH = replace(SWITCH, predicted_saving_s=0.0, predicted_cost_s=0.0, reason="scripted")
PLANNED = replace(TRACE, times_s=(0.25, 1.5, 1.75), total_s=2.0, layout=("dp2tp1",) * 3, moves=())
FORCED = replace(PLANNED, total_s=2.5, layout=TRACE.layout, moves=(FORCED_SWITCH,))
COMPUTED = ComputedPlan(
    command="python -m pat_jax.plan --model <8b>",
    model="<8b>",
    target="h100:8",
    responses=512,
    max_tokens=24576,
    reliance="Measured steps took × 0.9 to 1.4.",
    planned_s=75.0,
    static=(("dp8tp1", 200.0), ("dp1tp8", 100.0)),
    trace=replace(PLANNED, is_computed=True),
)
SHOWN = ShownSwitch(
    step=61,
    is_cpu=True,
    reason="stay in dp2tp1: no other saves any of 2.00 s",
    planned=PLANNED,
    forced=FORCED,
    responses=128,
    tokens=3000,
    same_tokens=2999,
    computed=COMPUTED,
)


@pytest.mark.parametrize("shown", [SHOWN, replace(SHOWN, computed=None)], ids=["whole", "here"])
def test_it_comes_back_from_its_file(tmp_path: Path, shown: ShownSwitch):
    assert read_switch(tmp_path) is None
    write_switch(tmp_path, shown)
    assert read_switch(tmp_path) == shown


@pytest.mark.parametrize("text", ["[]", "\xff", '{"step": 61}'])
def test_another_file_is_one_sentence_and_takes_one_section(tmp_path: Path, text: str, caplog):
    (tmp_path / SWITCH_FILE).write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=r"switch\.json is not as a run writes it"):
        read_switch(tmp_path)
    assert "A section is left out here" in run_page(tmp_path)
    assert len(caplog.messages) == 1


def section(folder: Path, shown: ShownSwitch) -> str:
    write_switch(folder, shown)
    return section_of(run_page(folder), "The same rollout twice")


def test_tokens_cost_and_both_rollouts_are_on_the_page(tmp_path: Path):
    assert "The same rollout twice" not in run_page(tmp_path)
    told = section(tmp_path, SHOWN)
    assert "The rollout of step 61" in told
    assert "2,999 of 3,000 tokens are the same" in told
    assert "the switch took 0.062 s (weights resharded, KV cache migrated, 3.0 MiB moved)" in told
    assert "2.50 s with it, 2.00 s as planned" in told
    before, _, after = told.partition("With a forced switch")
    assert before.count("running sequences, and the layout in force") == 1
    assert after.count("running sequences, and the layout in force") == 2  # and the computed one


def test_what_was_computed_is_marked_and_comes_with_its_command(tmp_path: Path):
    told = section(tmp_path, SHOWN)
    measured, _, computed = told.partition("<8b> on h100:8: computed, not measured")
    assert "computed" not in measured and "Nothing ran" in computed
    assert "100.0 s in dp1tp8, the best static layout: 25.0 % saved" in computed
    assert "Computed again by: python -m pat_jax.plan --model <8b>" in computed
    assert "62.5 %" in computed and "× 0.9 to 1.4" in computed
    assert "8b" not in section(tmp_path, replace(SHOWN, computed=None))


def test_that_a_switch_saves_nothing_is_said_where_it_is_so():
    *_, last = SHOWN.lines()
    assert "saves next to nothing" in last and SHOWN.reason in last
    for other in (replace(SHOWN, is_cpu=False), replace(SHOWN, planned=FORCED)):
        assert not any("saves next to nothing" in line for line in other.lines())


def test_rollouts_are_drawn_over_the_same_seconds():
    figure = draw_rollouts({"as planned": PLANNED, "forced": FORCED})
    assert [(plot.across.low, plot.across.high) for plot in figure.plots] == [(0, 2.5)] * 2
    titles = [plot.title for plot in figure.plots]
    assert [title.partition(":")[0] for title in titles] == ["as planned", "forced"]
    (told,) = figure.told
    assert "dp2tp1 to dp1tp2 at 40 running" in told
    assert "predicted" not in told  # nothing is, of a switch that no planner has chosen
