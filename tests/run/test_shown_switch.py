"""The same rollout twice: what is kept of it, said of it and shown on the page."""

from dataclasses import replace
from pathlib import Path

import pytest
from pages import section_of
from traces import SWITCH, TRACE

from pat_jax.common.errors import UserError
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
